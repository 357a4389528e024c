"""What ``GET /metrics`` counts."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """The numbers of one server; ``writing`` and ``waiting`` count its texts at the time of a request."""

    def __init__(self, writing: Callable[[], int], waiting: Callable[[], int]) -> None:
        self.registry = to = CollectorRegistry()
        model, path = ("model",), ("path",)
        self.tokens = Counter("minigpt_generated_tokens_total", "Tokens written.", model, registry=to)
        self.prompts = Counter("minigpt_prompt_tokens_total", "Tokens of prompts.", model, registry=to)
        first = "From a request to its text's first token."
        self.first = Histogram("minigpt_time_to_first_token_seconds", first, model, registry=to, buckets=SECONDS)
        self.responses = Counter("minigpt_requests_total", "Responses.", ("path", "status"), registry=to)
        whole = "From a request to the end of its response."
        self.seconds = Histogram("minigpt_request_seconds", whole, path, registry=to, buckets=SECONDS)
        Gauge("minigpt_texts_writing", "Texts that are being written.", registry=to).set_function(writing)
        Gauge("minigpt_texts_waiting", "Texts that wait for a place.", registry=to).set_function(waiting)

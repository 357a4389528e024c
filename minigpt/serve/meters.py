"""What ``GET /metrics`` counts."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Meters:
    """The numbers of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_model = {"labelnames": ("model",), "registry": self.registry}
        self._tokens = Counter("minigpt_generated_tokens_total", "Tokens written.", **by_model)
        self._prompts = Counter("minigpt_prompt_tokens_total", "Tokens of prompts.", **by_model)
        self._first = Histogram(
            "minigpt_time_to_first_token_seconds",
            "From a request to its text's first token.",
            buckets=SECONDS,
            **by_model,
        )
        self._requests = Counter("minigpt_requests_total", "Responses.", ("path", "status"), registry=self.registry)
        self._seconds = Histogram(
            "minigpt_request_seconds", "From a request to the end of its response.", ("path",), buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip

    def watch(self, writing: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Show the values of these functions at the time of a request."""
        for name, said, value in (
            ("minigpt_texts_writing", "Texts that are being written.", writing),
            ("minigpt_texts_waiting", "Texts that wait for a place.", waiting),
        ):
            Gauge(name, said, registry=self.registry).set_function(value)

    def tokens(self, model: str, count: int) -> None:
        self._tokens.labels(model).inc(count)

    def prompt(self, model: str, count: int) -> None:
        self._prompts.labels(model).inc(count)

    def first_token(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def response(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all numbers in Prometheus' format."""
        return generate_latest(self.registry)

"""Made-up parity reports as their JSON holds them: of any depth, passing or failing, hardly two figures alike."""

import io
import random
from typing import Any

from rich.console import Console, RenderableType

from minigpt.report.parity_report import ParityReport
from minigpt.report.parts import parity_summary

Report = dict[str, Any]

TEXT = (
    "Once| upon| a| time| there| was| a| little| fox|.|\n|He| lived| in| the| wood| with| his| mother|,| and| every"
    "| morning| they| went| out| to| look| for| berries|.| One| day|,| they| found| a| door|."
)


def made(fields: Report) -> ParityReport:
    """The object of a report's JSON, as a judgement makes it."""
    return ParityReport.from_dict(fields)


def sample_report(layers: int = 12, *, passing: bool = True, norm: str = "textbook", seed: int = 0) -> Report:
    """All that a report can hold. A failing one goes wrong at ln_2 of the middle block and stays so."""
    draw = random.Random(seed)
    error = (1.13e-6 if passing else 3.4e-2) * draw.uniform(0.9, 1.1)
    sites = norm_sites(layers, passing, draw)
    return {
        "model": "demo" if layers < 12 else "gpt2", "norm": norm, "sites": ["*"], "device": "cpu", "dtype": "float32",
        "attention": "sdpa", "prompts": "4 texts", "against": None, "quantize": None,
        "center": False, "exact": True, "notes": [], "missing": [], "changes": [], "against_norm": "fused",
        "built_in": False, "difference": None, "nan": None, "account": None if passing else account(draw),
        "versions": {"minigpt": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0",
                     "hardware": "x86_64", "threads": 2, "float32_products": "full float32 (TF32 off)"},
        "norm_sites": sites,
        "blocks": [block(f"h.{i}", site) for i, site in enumerate(sites[1:-1:2])],
        **outcome(passing, error, f"h.{layers // 2}.ln_2"),
        **measured(error, sites, draw),
        "fit": [{"site": site["site"], "before": draw.random(), "after": draw.random()} for site in sites],
        "removal": {"loss": 2.81, "tokens": 318, "allowed": None, "steps": [
            {"site": site["site"], "kl_mean": 1e-3 * draw.random(), "kl_mean_se": 1e-4 * draw.random(),
             "loss": 2.81 + draw.random(), "loss_change": draw.random(), "loss_change_se": 0.1 * draw.random()}
            for site in sites]},
        "gradients": [{"parameter": f"{site['site']}.weight", "relative_error": 1e-6 * draw.random(),
                       "noise": 1e-6 * draw.uniform(0.5, 1), "ratio": draw.random()} for site in sites],
        "budget": None,
        "precision": {"like": "float32", "ratio": error / 1.2471e-6},
        "diagnosis": None if passing else [
            {"mistake": "the exact GELU in place of tanh", "ratio": 1.08, "explains": True,
             "rest": {"like": "float32", "ratio": 1.08}, "cure": "Write a in place of b."}],
    }  # fmt: skip


def outcome(passing: bool, error: float, culprit: str) -> Report:
    """The verdict and what differs by it alone."""
    floor, worse = 1.2471e-6, 1.0 if passing else 1.00673
    reasons = [
        f"The logits' RMS error is {error:.3g}, {error / floor:.3g} times the noise floor of float32; at most 2 times "
        "is parity.",
        "Greedy decoding of prompt 2 diverges at new token 17, where the two best logits are 0.313 apart and the noise "
        "is only 1.82e-05.",
    ]
    return {
        "verdict": "pass" if passing else "fail",
        "reasons": [] if passing else reasons,
        "bitwise": {"equal": True, "max_abs_error": 0.0},
        "logits": {"max_abs_error": error * 7.1, "rms_error": error, "scale": 33.47, "noise_floor_max": 9.1e-6,
                   "noise_floor_rms": floor, "ratio": error / floor, "ratio_without_shift": 0.99 * error / floor},
        "decoding": {"max_abs_error": error * 6.7, "rms_error": error * 0.97, "scale": 33.12, "noise_floor_max": 9.1e-6,
                     "noise_floor_rms": floor, "ratio": 0.97 * error / floor,
                     "ratio_without_shift": 0.96 * error / floor},
        "text": {"file": None, "tokens": 1024, "windows": 1, "window": 1024, "logits": {
                    "max_abs_error": error * 7.7, "rms_error": error * 1.01, "scale": 33.9, "noise_floor_max": 9.9e-6,
                    "noise_floor_rms": 1.2631e-6, "ratio": 1.013 * error / floor,
                    "ratio_without_shift": 1.011 * error / floor},
                 "first_off": None if passing else {
                    "window": 0, "position": 207, "token": 207, "error": 0.0517, "noise": 8.8e-6, "ratio": 27001.5}},
        "new_errors": [], "every_place": True, "stored": None,
        "prompt_off": None if passing else {
            "prompt": 1, "position": 11, "error": 0.0613, "noise": 9.7e-6, "ratio": 31007.3, "prompts_off": 3,
            "prompts": 4},
        "first_off": None if passing else {
            "place": culprit, "error": 0.0021, "noise": 3.1e-7, "ratio": 6774.2, "ratio_before": None},
        "distribution": {
            "tokens": 318, "kl_mean_se": error**2 / 17, "top1_agreement_se": 0.0 if passing else 0.00347,
            "loss_change": error**2 / 2.3, "loss_change_se": error**2 / 19,
            "top1_agreement": 1.0 if passing else 0.98263, "top5_agreement": 0.99996 if passing else 0.95417,
            "kl_mean": error**2 / 3, "kl_median": error**2 / 5, "kl_p90": 4.1 * error**2,
            "kl_p99": 7.7 * error**2, "kl_p999": 9.3 * error**2, "kl_max": 12.7 * error**2,
            "worst": {"window": 2, "position": 57, "text": "They went out to look for berries"},
            "perplexity_reference": 18.34567, "perplexity_candidate": 18.345671 * worse},
        "greedy": {"tokens_compared": 128 if passing else 82, "first_divergence": None if passing else divergence()},
        "perplexity": {"file": "data/held-out.txt", "tokens": 21873, "window": 1024, "stride": 512,
                       "reference": 17.90213, "candidate": 17.90213 * worse, "loss_se": 0.0231,
                       "loss_change": worse - 1, "loss_change_se": 0.00041, "entropy": 2.71, "rows": [[1023, 2951.1]]},
        "coverage": {"positions": 1024, "context": 1024, "tokens": 1131, "vocabulary": 50257},
        "bisect": {"sites": [] if passing else [culprit], "sets": [] if passing else [[culprit]],
                   "verdicts": 1 if passing else 23},
    }  # fmt: skip


def measured(error: float, sites: list[Report], draw: random.Random) -> Report:
    """What stands beside the verdict: divergence along a text, the sites one at a time."""
    pieces = TEXT.split("|")
    alone = [(site["site"], site["local_error"] * draw.uniform(2, 9)) for site in sites if site["swapped"]]
    return {
        "tokens": {"prompt": 0, "pieces": pieces, "new_from": 7,
                   "kl": [error**2 * 10 ** draw.uniform(-1.5, 1.2) for _ in pieces]},
        "sensitivity": [{"site": site, "rms_error": x, "ratio": x / 1.2471e-6}
                        for site, x in sorted(alone, key=lambda change: -change[1])],
    }  # fmt: skip


def account(draw: random.Random) -> Report:
    """The account of a file's error."""

    def share(part: str, *, is_model: bool = False) -> Report:
        perplexity = draw.uniform(20, 40) if is_model else None
        return {"part": part, "ratio": draw.uniform(1e4, 4e4), "kl": draw.random(), "perplexity": perplexity}

    def tensor(site: str) -> Report:
        return {"site": site, "kind": "Q4_K", "alone": draw.random(), "without": draw.random()}

    return {
        "program": "llama.cpp", "types": ["Q4_K", "Q6_K"], "tokens": 190, "positions": 286, "dtype": "float32",
        "perplexity": draw.uniform(20, 40), "total": share("the program", is_model=True),
        "weights": share("the weights", is_model=True),
        "own": share("the arithmetic"), "precisions": [share("bfloat16", is_model=True)],
        "steps": [share("GELU by a table in float16")], "effect": 2e4, "noise": draw.uniform(1e3, 1e4), "calm": 40,
        "calm_left": draw.random(), "calm_noise": draw.random(), "decides": False, "strange": [],
        "tensors": [tensor(f"h.{block}.mlp.c_fc.weight") for block in range(2)],
    }  # fmt: skip


def norm_sites(layers: int, passing: bool, draw: random.Random) -> list[Report]:
    """ln_1 and ln_2 of every block, then ln_f: noise that grows with depth, and in a failing report one wrong norm."""
    names = [f"h.{i}.{norm}" for i in range(layers) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    wrong = len(names) if passing else names.index(f"h.{layers // 2}.ln_2")
    sites = []
    for depth, name in enumerate(names):
        noise = 6e-8 * (1 + depth) ** 0.8 * draw.uniform(0.9, 1.1)
        local = 4.1e-8 * draw.uniform(0.7, 1.5) * (2e5 if depth == wrong else 1)
        drift = 2.1e-3 if depth > wrong else noise
        reached = max(local, drift * draw.uniform(0.8, 1.2))
        sites.append(
            {"site": name, "local_error": local, "propagated_error": reached, "swapped": depth > 0, "noise": noise}
        )
    return sites


def block(name: str, site: Report) -> Report:
    """The residual stream after a block whose last norm is ``site``."""
    return {"block": name, "error": site["propagated_error"] * 1.27, "noise": site["noise"] * 1.17}


def divergence() -> Report:
    """A parting beyond the noise, in words that begin alike."""
    shared = ' the old woman was sitting by the fire. "You are late," she said, and the'
    return {
        "prompt": 2, "token": 17, "candidate_id": 1119, "reference_id": 262, "margin": 0.3127, "noise": 1.82e-5,
        "within_noise": False,
        "prompt_text": "In the morning the village was quiet, because everyone who could walk had gone to the river. "
                       "When they came back,",
        "candidate_text": f"{shared}n told them of the stranger who had knocked three times.",
        "reference_text": f"{shared} children laughed, for she said so every day.",
    }  # fmt: skip


MADE = sample_report(2)


def report_with(**parts: Any) -> Report:
    """A passing report in which these parts are others."""
    return MADE | parts


def failing() -> Report:
    logits = {"max_abs_error": 0.875, "rms_error": 0.0456, "scale": 1.5, "noise_floor_max": 0.25}
    reasons = ["The logits' RMS error is 0.0456."]
    return report_with(
        logits=logits | {"noise_floor_rms": 0.0152, "ratio": 3.0, "ratio_without_shift": 3.0},
        bisect=None,
        verdict="fail",
        reasons=reasons,
    )


def shown(report: Report, width: int = 400) -> str:
    """The summary as it is written to a file."""
    return printed(parity_summary(made(report)), width)


def printed(summary: RenderableType, width: int = 400) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(summary)
    return file.getvalue()


def with_budget(report: Report) -> Report:
    """The same report, judged by a budget of which one line is kept and one is not."""
    lines = [
        {"quantity": "kl", "limit": 3.2e-6, "measured": 1.26e-5, "kept": False, "text": "the prompts"},
        {"quantity": "perplexity", "limit": 1.3e-4, "measured": 2.9e-5, "kept": True, "text": "held.txt"},
    ]
    reasons = ["The budget allows kl 3.2e-06, and it is 1.26e-05 on the prompts."]
    return report | {"budget": lines, "verdict": "fail", "reasons": reasons}

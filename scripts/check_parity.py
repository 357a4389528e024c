"""Is a model with another norm still the same model? python scripts/check_parity.py --model gpt2 --norm textbook"""

import sys

import typer

import minigpt


def main(model: str = "demo", norm: str = "textbook", sites: str = "*", dtype: str | None = None) -> None:
    """Judge by the logits against transformers in float64, and print the error beside transformers' own."""
    report = minigpt.parity(model, norm=norm, sites=sites, dtype=dtype)
    for site in report.norm_sites:
        print(f"{site.site:10}  own error {site.local_error:.2e}   propagated error {site.propagated_error:.2e}")
    logits = report.logits
    print(f"logits: RMS error {logits.rms_error:.3g} on a scale of {logits.scale:.3g}")
    print(f"transformers' own in {report.dtype}: {logits.noise_floor_rms:.3g}, so the ratio is {logits.ratio:.3g}")
    print("parity holds" if report.passed else " ".join(report.reasons))
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    typer.run(main)

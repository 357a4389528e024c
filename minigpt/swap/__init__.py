"""What is done to a loaded model: other norms at its sites, folding, calibration."""

from minigpt.swap.calibration import calibrate
from minigpt.swap.fold import fold_norms
from minigpt.swap.sites import match_sites, swap_norms

__all__ = ["calibrate", "fold_norms", "match_sites", "swap_norms"]

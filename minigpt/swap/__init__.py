"""Changes to a loaded model: other norms at its sites, fitting, folding, centring."""

from minigpt.swap.fit import fit_norms, fit_on_text
from minigpt.swap.fold import center_writers, fold_norms
from minigpt.swap.sites import match_sites, swap_norms

__all__ = ["center_writers", "fit_norms", "fit_on_text", "fold_norms", "match_sites", "swap_norms"]

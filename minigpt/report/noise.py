"""The numbers by which an error is judged. The unit is the noise floor: transformers' own error at the dtype."""

import sys

MOST_NOISE = 2.0  # a candidate may be this many times as far from the truth as transformers itself
MOST_DECODING_NOISE = 4.0  # for tokens read one by one, of which few are read, so that the floor may be small
FAR_OFF = 8.0  # an output is off from so many times transformers' own error there on
NEAR = 1.5  # an error is like transformers' own if neither is larger by more than this factor


def noise_ratio(rms_error: float, noise_floor: float, scale: float = 1.0) -> float:
    """Return an RMS error as a multiple of the noise floor, which is at least the truth's own rounding."""
    return rms_error / (noise_floor or 8 * sys.float_info.epsilon * (scale or 1.0))

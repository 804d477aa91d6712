"""How close frames are to the truth: PSNR and SSIM, per frame."""

from __future__ import annotations

import torch

from model.data.clip import Pixels

PSNR_CEILING_DB = 58.92
"""PSNR of frames that differ by no more than rounding to 8 bits: 10 log10(12 * 255**2), a uniform error of one level.

Equal frames would have an infinite one, and no mean.
"""


def frame_psnr(frames: Pixels, truth: Pixels) -> torch.Tensor:
    """PSNR in dB of each of uint8 [N, H, W, C] against ``truth``, fp64 [N], at most ``PSNR_CEILING_DB``."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    made, real = _unit(frames), _unit(truth)
    psnr = peak_signal_noise_ratio(made, real, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return psnr.clamp_max(PSNR_CEILING_DB)


def frame_ssim(frames: Pixels, truth: Pixels) -> torch.Tensor:
    """SSIM (Gaussian window of 11, sigma 1.5) of each of uint8 [N, H, W, C] against ``truth``, fp64 [N]."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    ssim = structural_similarity_index_measure(_unit(frames), _unit(truth), data_range=1.0, reduction="none")
    assert isinstance(ssim, torch.Tensor)
    return ssim


def _unit(frames: Pixels) -> torch.Tensor:
    """uint8 [N, H, W, C] as fp64 [N, C, H, W] in [0, 1]."""
    return torch.tensor(frames).permute(0, 3, 1, 2).to(torch.float64) / 255.0

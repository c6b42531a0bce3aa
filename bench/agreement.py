"""Do two training models compute the same? Loss and every gradient, within what their precision allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Largest relative difference of the loss, of the whole gradient and of one tensor's (L2 norms). In bf16 rounding alone makes
# 0.02 of the gradient; one key too many in the mask made 0.15 of it at S 512, rounded RoPE frequencies 0.09.
TOLERANCES = {"fp32": (1e-5, 1e-4, 1e-3), "bf16": (1e-3, 0.05, 0.1)}


def gradient_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, dict[str, float]]:
    """|found - expected| / |expected| (L2): of all tensors as one vector, and of each by name. Raises ValueError when the
    names differ."""
    if found.keys() != expected.keys():
        raise ValueError(
            f"expected the same gradients on both sides, found only on one {sorted(found.keys() ^ expected.keys())}"
        )
    squares = {}
    for name, tensor in expected.items():
        wanted = tensor.float()
        squares[name] = (float((found[name].float() - wanted).square().sum()), float(wanted.square().sum()))
    return _relative(*map(sum, zip(*squares.values(), strict=True))), {n: _relative(*s) for n, s in squares.items()}


def compare(
    name: str,
    precision: str,
    *,
    loss: float,
    gradients: Mapping[str, Tensor],
    specforge_loss: float,
    specforge_gradients: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The differences, for the result. Both losses are weighted means over the same slots and both gradients those of the
    weighted sum, so there is nothing to convert. Raises ValueError when they are more than TOLERANCES allow."""
    whole, each = gradient_differences(gradients, specforge_gradients)
    worst = max(each, key=lambda tensor: each[tensor])
    loss_difference = abs(loss - specforge_loss) / abs(specforge_loss)
    checks = zip(
        ("loss", "gradient", f"gradient of {worst}"),
        (loss_difference, whole, each[worst]),
        TOLERANCES[precision],
        strict=True,
    )
    for what, difference, most in checks:
        # Not `>`: NaN is no agreement.
        if not difference <= most:
            raise ValueError(
                f"{name}: expected ours and SpecForge's {what} to differ by at most {most:.0e} in {precision}, found "
                f"{difference:.1e} (losses {loss:.6f} and {specforge_loss:.6f}); no speed is shown"
            )
    return {
        "loss": loss,
        "specforge_loss": specforge_loss,
        "loss_difference": loss_difference,
        "gradient_difference": whole,
        "worst_gradient": worst,
        "worst_gradient_difference": each[worst],
    }


def _relative(difference: float, size: float) -> float:
    """From sums of squares. A NaN stays one."""
    return (difference / max(size, 1e-30)) ** 0.5

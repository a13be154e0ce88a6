"""Rotating and shrinking many small images at once."""

import numpy as np


def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """uint8 [n, channels, side, side] turned counter-clockwise about the centre: bilinear, zero outside, rounded.

    Every image takes the same four source pixels and weights for each target pixel, so they are worked out once.
    """
    side = images.shape[-1]
    if images.shape[-2] != side:
        raise ValueError(f"square images only, not {images.shape[-2]} x {side}")
    angle, centre = np.deg2rad(degrees), (side - 1) / 2
    row, column = np.indices((side, side)) - centre
    # Rows count downwards, so turning the picture counter-clockwise looks its pixels up clockwise with this sign.
    from_column = np.cos(angle) * column - np.sin(angle) * row + centre
    from_row = np.sin(angle) * column + np.cos(angle) * row + centre
    # Rounded, so that quarter turns fall on whole pixels.
    from_row, from_column = np.round(from_row, 9), np.round(from_column, 9)
    top, left = np.floor(from_row).astype(int), np.floor(from_column).astype(int)
    down, right = from_row - top, from_column - left
    corners = (
        (top, left, (1 - down) * (1 - right)),
        (top, left + 1, (1 - down) * right),
        (top + 1, left, down * (1 - right)),
        (top + 1, left + 1, down * right),
    )
    tables = []
    for y, x, weight in corners:
        inside = (y >= 0) & (y < side) & (x >= 0) & (x < side)
        tables.append((np.where(inside, y * side + x, 0).ravel(), (weight * inside).astype(np.float32).ravel()))
    flat = images.reshape(-1, side * side)
    turned = np.empty_like(flat)
    for start in range(0, len(flat), 4096):  # in blocks, so that the float copies stay small
        block = flat[start : start + 4096]
        total = sum(block[:, where] * weight for where, weight in tables)
        turned[start : start + 4096] = np.rint(total)
    return turned.reshape(images.shape)


def halve(images: np.ndarray) -> np.ndarray:
    """uint8 [n, channels, 2h, 2w] to [n, channels, h, w]: the mean of each 2 x 2 block, rounded half up."""
    wide = images.astype(np.uint16)
    total = wide[..., ::2, ::2] + wide[..., 1::2, ::2] + wide[..., ::2, 1::2] + wide[..., 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)

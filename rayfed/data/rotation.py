"""Rotate and shrink many small images at once."""

import numpy as np


def rotate(images: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate images, uint8 [n, channels, side, side], counter-clockwise about their centre.

    Interpolation is bilinear, with zeros outside of the image, and the result is rounded. The four source pixels of
    each target pixel and their weights are the same for all images, so they are computed once.
    """
    side = images.shape[-1]
    if images.shape[-2] != side:
        raise ValueError(f"expected square images, got {images.shape[-2]} x {side}")
    angle, centre = np.deg2rad(degrees), (side - 1) / 2
    row, column = np.indices((side, side)) - centre
    # Rows count downwards, hence the signs: a counter-clockwise rotation looks pixels up clockwise.
    from_column = np.cos(angle) * column - np.sin(angle) * row + centre
    from_row = np.sin(angle) * column + np.cos(angle) * row + centre
    # Rounded so that quarter turns map pixels exactly onto pixels.
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
    rotated = np.empty_like(flat)
    for start in range(0, len(flat), 4096):  # in blocks, so that the float copies stay small
        block = flat[start : start + 4096]
        total = sum(block[:, pixels] * weight for pixels, weight in tables)
        rotated[start : start + 4096] = np.rint(total)
    return rotated.reshape(images.shape)


def halve(images: np.ndarray) -> np.ndarray:
    """Shrink images, uint8 [n, channels, 2h, 2w], to [n, channels, h, w] by means of 2 x 2 blocks, rounded half up."""
    wide = images.astype(np.uint16)
    total = wide[..., ::2, ::2] + wide[..., 1::2, ::2] + wide[..., ::2, 1::2] + wide[..., 1::2, 1::2]
    return ((total + 2) // 4).astype(np.uint8)

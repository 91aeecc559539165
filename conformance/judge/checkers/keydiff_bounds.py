"""Error bounds of KeyDiff's scores and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ....reference import keydiff
from ..bounds import DIVISION, FLUSH, SLACK, UNIT, gamma

#: An approximate square root, or its inverse (PTX sqrt.approx, rsqrt.approx: 2^-22.9 at the worst).
ROOT = 2.0**-22
#: The part of a product with a normalised key that may flush to zero: keys longer than 2^-40 need not be scaled up.
LOST = FLUSH * 2.0**40


@dataclass(frozen=True)
class Keys:
    """Exact directions of low-precision keys, in float64, and their error bounds.

    key [B, Hkv, S, D], zeros where unoccupied; occupied [B, Hkv, S]; anchor as in `score`. carried [B, Hkv, 1, D]: the
    error of the sum of normalised keys, if it may be carried from step to step instead of recomputed (`keydiff.Drift`).

    A computed k^_id = k_id / ||k_i|| is k^_id (1 + common)(1 + own) + vanished:
    - own, independent for each channel: the scaling by the largest magnitude and the division (or the product with an
      inverse), 2 DIVISION.
    - common to all channels of a key: the error of the length, which is gamma(D) / 2 for the sum of squares of scaled
      numbers (DIVISION) and a ROOT; and one DIVISION for a factor that all ranks share, as in implementations that rank
      by the cosine. Together 2 DIVISION + ROOT + gamma(D + 2) / 2.
    - vanished: channels below 2^-126 may flush to zero, by the triangle inequality 2 sqrt(D) FLUSH / ||k_i|| of a unit
      vector; at most 1, since no sign changes.
    """

    key: Tensor
    occupied: Tensor
    anchor: str = "mean_normalized"
    carried: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.key.shape[-1]

    @property
    def own(self) -> float:
        return 2 * DIVISION

    @property
    def common(self) -> float:
        common: float = ROOT + 2 * DIVISION + gamma(self.head_dim + 2) / 2
        return common

    @cached_property
    def unit(self) -> Tensor:
        """k^_i, [B, Hkv, S, D]."""
        return keydiff.normalized(self.key)

    @cached_property
    def vanished(self) -> Tensor:
        """[B, Hkv, S, 1]; 0 for zero keys."""
        size = self.key.norm(dim=-1, keepdim=True)
        lost = (2 * self.head_dim**0.5 * FLUSH / size.clamp_min(1e-300)).clamp_max(1)
        return lost.masked_fill(size == 0, 0)

    @cached_property
    def count(self) -> Tensor:
        """The number of keys, [B, Hkv, 1, 1] float64, at least 1."""
        return self.occupied.sum(-1).clamp_min(1)[..., None, None].double()

    @cached_property
    def unit_sum_error(self) -> Tensor:
        """|computed - true| of sum_j k^_j in each channel, [B, Hkv, 1, D], when summed over all keys.

        Each term has its own error and passes through at most n roundings in any order of summation.
        """
        size = self.unit.abs()
        term = ((1 + self.own) * (1 + self.common) - 1) * size + self.vanished
        error = (term + gamma(self.count) * (size + term)).sum(2, keepdim=True) + LOST
        return error * SLACK

    @cached_property
    def direction(self) -> Tensor:
        """The vector that ranks use instead of the anchor, [B, Hkv, 1, D]: see the reference's `direction`."""
        return keydiff.direction(self.key, self.occupied, self.anchor)

    @cached_property
    def direction_error(self) -> Tensor:
        """|computed - true| of `direction` in each channel, up to a common factor.

        For a mean, each key is scaled (DIVISION) and passes through n roundings and one division; keys far below the
        largest may flush to zero. A median is one of the numbers in each channel, scaled (DIVISION) by the largest of
        the medians; numbers below 2^-126 may flush to zero.
        """
        if self.anchor == "mean_normalized":
            return self.unit_sum_error if self.carried is None else self.carried
        if self.anchor == "median":
            largest = keydiff.center(self.key, self.occupied, self.anchor).abs().amax(-1, keepdim=True)
            lost = (FLUSH / largest.clamp_min(1e-300)).clamp_max(1).masked_fill(largest == 0, 0)
            return DIVISION * self.direction.abs() * SLACK + lost + FLUSH
        size = keydiff.scaled_down(self.key.flatten(2))[0].view(self.key.shape).abs().sum(2, keepdim=True) / self.count
        return (gamma(self.count) + 2 * DIVISION) * size * SLACK + LOST

    def product_error(self, extra: float = 0, *, order_only: bool = False) -> Tensor:
        """|computed - true| of k^_i . direction, [B, Hkv, S]; 0 for a zero key.

        Per channel: the error of each factor, gamma(D) for the products and their sum, and `extra` for further errors
        of the direction's channels. Per key: the common error of the length. Products may flush to zero.

        order_only: the bound up to a number that all keys of a head share. An error e of the direction changes
        k^_i . direction by k^_i . e = c . e + (k^_i - c) . e for any c. The first part is the same for all keys and
        changes no order. With c the mean of the k^_i, the second part is small where keys nearly agree, so that such
        keys remain distinguishable although their n terms are summed in any order, gamma(n). (A zero key ranks exactly
        0 among keys whose ranks have moved, so its bound includes all of c . e.)
        """
        size, direction = self.unit.abs(), self.direction.abs()
        off = self.direction_error + extra * (direction + self.direction_error)
        each = self.own * size + self.vanished
        center = self.unit.sum(2, keepdim=True) / self.count if order_only else torch.zeros_like(direction)
        channels = each * (direction + off) + (self.unit - center).abs() * off
        channels = channels + gamma(self.head_dim) * (size + each) * (direction + off)
        error = channels.sum(-1)
        true = (self.unit * self.direction).sum(-1).abs()
        error = (error + self.common * (true + error + (size * off).sum(-1)) + self.head_dim * LOST) * SLACK
        return self._of_occupied(error) if order_only else self._of_keys(error)

    def cosine_error(self) -> Tensor:
        """|computed - true| of cos(anchor, k_i), [B, Hkv, S]; 0 for a zero key.

        The product above divided by the anchor's length L. The anchor may be divided by n and by L in each channel (2
        DIVISION); L has the anchor's error, the error of the sum of squares and a ROOT; then one last division.
        Everything is divided by L: where the anchor vanishes, the cosine is noise, but is still at most 1 up to
        rounding.
        """
        length = self.direction.norm(dim=-1)                                            # [B, Hkv, 1]
        off = self.direction_error.norm(dim=-1) + (2 * DIVISION + ROOT + gamma(self.head_dim + 2)) * length
        off = off + LOST
        true = (self.unit * self.direction).sum(-1).abs()
        product = self.product_error(2 * DIVISION)
        least = length - off
        ratio = true / length.clamp_min(1e-300)
        error = (product + ratio * off) / least.clamp_min(1e-300) * (1 + DIVISION) + DIVISION * ratio
        most = 1 + ratio + 4 * (self.own + self.common + ROOT + gamma(2 * self.head_dim + 2))
        error = torch.where(least > 0, torch.minimum(error, most), most)
        return self._of_keys(error * SLACK)

    def mean_error(self) -> tuple[Tensor, Tensor]:
        """The anchor mu itself, and |computed - true| of it, [B, Hkv, 1, D]."""
        mu = keydiff.center(self.key, self.occupied, self.anchor)
        if self.anchor == "median":
            return mu, torch.full_like(mu, FLUSH)
        if self.anchor == "mean_normalized":
            error = self.direction_error / self.count
        else:
            error = gamma(self.count) * self.key.abs().sum(2, keepdim=True) / self.count + 2 * FLUSH
        return mu, (error + DIVISION * (mu.abs() + error)) * SLACK + FLUSH

    def dot_error(self, *, order_only: bool = False) -> Tensor:
        """|computed - true| of mu . k_i: the anchor's error, and gamma(D). order_only: see `product_error`."""
        mu, off = self.mean_error()
        size = self.key.abs()
        apart = (self.key - self.key.sum(2, keepdim=True) / self.count).abs() if order_only else size
        error = apart * off + size * gamma(self.head_dim) * (mu.abs() + off) + FLUSH * (2 + size + mu.abs())
        return self._of_occupied(error.sum(-1) * SLACK)

    def distance_error(self) -> Tensor:
        """|computed - true| of ||k_i - mu||: by the triangle inequality, the length of the difference's errors, plus
        the error of computing a length, in which squares below FLUSH may flush to zero."""
        mu, off = self.mean_error()
        difference = (self.key - mu).abs()
        error = (off + UNIT * (difference + off) + FLUSH).norm(dim=-1)
        of_length = gamma(self.head_dim + 2) / 2 + ROOT + 3 * DIVISION
        error = error + of_length * (difference.norm(dim=-1) + error) + (self.head_dim * FLUSH) ** 0.5
        return self._of_occupied(error * SLACK)

    def pairwise_error(self) -> Tensor:
        """|computed - true| of sum_j k^_i . k^_j, [B, Hkv, S], summed over channels and keys in any order.

        Each of the n D products has the errors of both keys and passes through at most n + D roundings.
        """
        size = self.unit.abs()
        relative = ((1 + self.own) * (1 + self.common)) ** 2 * (1 + gamma(self.count + self.head_dim)) - 1
        total = (size + self.vanished).sum(2, keepdim=True)
        error = relative * (size + self.vanished) * total
        error = error + self.vanished * total + size * self.vanished.sum(2, keepdim=True)
        error = error.sum(-1) + self.count[..., 0] * self.head_dim * LOST
        return self._of_keys(error * SLACK)

    def _of_keys(self, error: Tensor) -> Tensor:
        """The error, with 0 for zero keys and unoccupied slots, whose results are exact."""
        return error.masked_fill(~self.occupied | (self.key == 0).all(-1), 0)

    def _of_occupied(self, error: Tensor) -> Tensor:
        return error.masked_fill(~self.occupied, 0)


def score_error(keys: Keys, similarity: str) -> Tensor:
    """Bound of `score`, [B, Hkv, S]; 0 where unoccupied, and for a cosine with a zero key."""
    return {"cosine": keys.cosine_error, "dot": keys.dot_error, "euclidean": keys.distance_error}[similarity]()


def rank_error(keys: Keys, similarity: str) -> Tensor:
    """Bound of the reference's `rank`, which orders evictions (cosines without their divisions), up to a number that
    all keys of a head may share."""
    if similarity == "euclidean":
        return keys.distance_error()
    return (keys.product_error if similarity == "cosine" else keys.dot_error)(order_only=True)

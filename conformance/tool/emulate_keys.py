"""KeyDiff in float32 as different machines compute it, to test its bounds: see emulate.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ...reference import keydiff
from ..cases.key_cases import KeyCase
from ..judge.bounds import DIVISION
from ..judge.checkers.keydiff_bounds import ROOT
from .emulate import Machine

#: The share of their allowed error that roots and divisions have before their last rounding.
ALMOST = 1 - 2.0**-4


@dataclass(frozen=True)
class KeyMachine(Machine):
    """One variant of KeyDiff's arithmetic. powers: keys are scaled by a power of two, not by their largest element.
    late: ranks are products of the scaled keys, and are divided by lengths afterwards."""

    powers: bool = False
    late: bool = False

    def root(self, squares: Tensor) -> Tensor:
        return (squares.double().sqrt() * (1 + self.lean * ROOT * ALMOST)).float()

    def over(self, left: Tensor, right: Tensor) -> Tensor:
        """left / right, and 0 where right is 0."""
        exact = left.double() / right.double().masked_fill(right == 0, 1) * (1 - self.lean * DIVISION / 2 * ALMOST)
        return torch.where(right == 0, 0, exact).float()

    def scaled(self, vector: Tensor) -> Tensor:
        vector = self.flush(vector.float())
        largest = vector.abs().amax(-1, keepdim=True)
        if self.powers:
            exponent = largest.double().masked_fill(largest == 0, 1).log2().floor()
            return (vector.double() * torch.exp2(-exponent)).float()
        return self.flush(self.over(vector, largest))

    def length(self, vector: Tensor) -> Tensor:
        return self.root(self.product_sum(vector, vector))[..., None]

    def unit(self, vector: Tensor) -> Tensor:
        scaled = self.scaled(vector)
        return self.over(scaled, self.length(scaled))

    def total(self, vectors: Tensor) -> Tensor:
        """Over the slots: [B, H, S, D] -> [B, H, 1, D]."""
        return self.sum(vectors.transpose(-1, -2))[:, :, None]

    def anchor(self, key: Tensor, occupied: Tensor, anchor: str) -> Tensor:
        """[B, H, 1, D]."""
        if anchor == "median":
            return keydiff.center(key, occupied, anchor)
        count = occupied.sum(-1).clamp_min(1)[..., None, None].float()
        return self.over(self.total(self.unit(key) if anchor == "mean_normalized" else key), count)

    def direction(self, case: KeyCase) -> Tensor:
        """[B, H, 1, D], scaled as in the reference."""
        key = keydiff.occupied_keys(case.key, case.mask).float()
        if case.anchor == "mean_normalized":
            return self.total(self.unit(key))
        if case.anchor == "median":
            return dataclasses.replace(self, powers=False).scaled(self.anchor(key, case.mask, case.anchor))
        scaled = dataclasses.replace(self, powers=False).scaled(key.flatten(2)).view(key.shape)
        return self.anchor(scaled, case.mask, case.anchor)

    def rank(self, case: KeyCase, direction: Tensor) -> Tensor:
        key = keydiff.occupied_keys(case.key, case.mask).float()
        if not self.late:
            return -self.product_sum(self.unit(key), direction)
        scaled = self.scaled(key)
        return -self.over(self.product_sum(scaled, direction), self.length(scaled)[..., 0])

    def score(self, case: KeyCase) -> Tensor:
        key = keydiff.occupied_keys(case.key, case.mask).float()
        if case.similarity == "cosine":
            direction = self.direction(case)
            if self.late:
                score = self.over(self.rank(case, direction), self.length(direction)[..., 0])
            else:
                score = -self.product_sum(self.unit(key), self.unit(direction))
        else:
            mu = self.anchor(key, case.mask, case.anchor)
            score = -self.product_sum(key, mu) if case.similarity == "dot" else self.distance(key - mu)
        return score.masked_fill(~case.mask, -torch.inf)

    def distance(self, vector: Tensor) -> Tensor:
        scaled = self.scaled(vector)
        largest = vector.abs().amax(-1) if not self.powers else self.over(vector, scaled).abs().amax(-1)
        return largest * self.length(scaled)[..., 0]

    def pairwise(self, case: KeyCase) -> Tensor:
        unit = self.unit(keydiff.occupied_keys(case.key, case.mask).float())
        cosine = self.product_sum(unit[:, :, :, None], unit[:, :, None])
        return -self.sum(cosine).masked_fill(~case.mask, torch.inf)

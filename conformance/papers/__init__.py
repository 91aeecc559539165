"""The papers: their claims and readings, which are in the wheel, and the tests of the claims, which are not."""

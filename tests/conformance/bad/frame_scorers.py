"""Scorers of frames that do not do what they have to."""

from itertools import count

import numpy as np

from conformance.part import Part
from forge_vlm.data.frame_selection import FrameScores

NUMBERS = count()


class Made:
    """A score and a vector of each frame, from its bytes, as `change` changes them."""

    def __init__(self, change, identity="one"):
        self.change, self.identity = change, identity

    def __call__(self, frames, question):
        features = np.array([[len(frame), sum(frame) % 97] for frame in frames], dtype=np.float64)
        return FrameScores(*self.change(features[:, 1], features))


def made(change, identity=lambda: "one"):
    return Part(make=lambda: Made(change, identity()))


BAD = {
    "check_shapes": [
        (made(lambda scores, features: (scores[1:], features)), r"4 frames have scores of shape \(3,\)"),
        (made(lambda scores, features: (scores, features[0])), r"4 frames have features of shape \(2,\)"),
        (made(lambda scores, features: (scores * np.nan, features)), "a score is not finite"),
        (made(lambda scores, features: (scores, features + np.inf)), "a feature is not finite"),
    ],
    "check_frames": [
        (made(lambda scores, features: (scores - scores.mean(), features)), "scores of frames alone differ"),
        (made(lambda scores, features: (scores + np.arange(len(scores)), features)), "in reverse order differ"),
    ],
    "check_deterministic": [
        (made(lambda scores, features: (scores + next(NUMBERS), features)), "give other scores"),
        (made(lambda scores, features: (scores, features), lambda: str(next(NUMBERS))), "different identities"),
    ],
}

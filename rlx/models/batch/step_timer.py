"""How many tokens of prompts a run may have, by the time that runs were measured to take.

A run with many tokens of a prompt makes those wait that decode in it. `seconds` is the time between
two tokens to aim at: the room for prompts is what fits beside the decodes. But prompts have more
tokens than answers: where many decode, and prompts got only what time is left, requests would pile
up before their first token. So there is room for some tokens of prompts for each that decodes.
"""

from __future__ import annotations

SECONDS = 0.1  # between two tokens of an answer, while prompts are prefilled
LEAST = 32  # tokens of prompts in a run, however long it takes
PER_DECODE = 4  # and for each token that is decoded in it
_IDLE = 4  # how much longer a run may take in which nobody decodes
_RISE, _FALL = 0.1, 0.5  # of the newest measurement in a mean: a run that was held up says little


class StepTimer:
    """Measures runs. A run takes what its decodes take alone, and a time for each prompt token."""

    def __init__(self, most: int, start: int, seconds: float = SECONDS) -> None:
        """A run has at most `most` tokens, and `start` of prompts before anything is measured."""
        self.seconds = seconds
        self._most, self._start = most, start
        self._decodes = 0.0  # seconds of a run without prompts
        self._token = 0.0  # seconds of a prompt's token beside them

    def observe(self, decodes: int, prompts: int, seconds: float) -> None:
        """A run with so many tokens took so long."""
        if not prompts:
            self._decodes = _mean(self._decodes, seconds)
        elif prompts >= LEAST // 2:
            alone = min(self._decodes, seconds) if decodes else 0.0
            self._token = _mean(self._token, (seconds - alone) / prompts)

    def room(self, decodes: int) -> int:
        """Tokens of prompts that fit beside so many decodes."""
        if not self._token:
            fits = self._start if decodes else self._most
        else:
            left = self.seconds - self._decodes if decodes else _IDLE * self.seconds
            fits = int(max(left, 0.0) / self._token)
        return max(min(max(fits, LEAST, PER_DECODE * decodes), self._most - decodes), 1)


def _mean(before: float, new: float) -> float:
    if not before:
        return new
    return before + (_FALL if new < before else _RISE) * (new - before)

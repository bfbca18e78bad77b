"""Where in a recording someone speaks: Silero VAD, an ONNX model with a state, on RLX.

    python examples/voice_activity.py [SOUND.wav]

Takes a WAV file of 16 kHz, one channel, 16 bits. Without one, it makes a sound: silence, vowels
(pulses through resonances of a mouth), noise.
"""

from __future__ import annotations

import sys
import wave

import numpy as np

import rlx

RATE, STEP, BEFORE = 16000, 512, 64  # samples a second, in a step, and seen again from the last
SPEECH = 0.5


def read(path: str) -> np.ndarray:
    with wave.open(path, "rb") as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path}: not 16 kHz, one channel, 16 bits")
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return data.astype(np.float32) / 32768


def resonance(x: np.ndarray, hertz: float, width: float) -> np.ndarray:
    """x through a resonance: a recursion over two samples."""
    r = np.exp(-np.pi * width / RATE)
    a, b = 2 * r * np.cos(2 * np.pi * hertz / RATE), -r * r
    y, y1, y2 = np.empty_like(x), 0.0, 0.0
    for i, value in enumerate(x):
        y1, y2 = value + a * y1 + b * y2, y1
        y[i] = y1
    return y


def vowels(seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Syllables: a falling pitch, other formants for each, a soft beginning and end."""
    parts = []
    formants = [(730, 1090, 2440), (270, 2290, 3010), (570, 840, 2410), (530, 1840, 2480)]
    for i in range(int(seconds / 0.25)):
        n = RATE // 4
        pitch = 130 - 20 * np.arange(n) / n + rng.normal(0, 1)
        phase = np.cumsum(pitch / RATE)
        pulses = (np.diff(np.floor(phase), prepend=0.0) > 0).astype(np.float64)
        y = pulses + rng.normal(0, 0.01, n)
        for hertz, width in zip(formants[i % 4], (80, 100, 140), strict=True):
            y = resonance(y, hertz, width)
        shape = np.minimum(1, np.minimum(np.arange(n), np.arange(n)[::-1]) / 900)
        parts.append(y / np.abs(y).max() * 0.5 * shape)
    return np.concatenate(parts).astype(np.float32)


def probabilities(model: rlx.OnnxModel, sound: np.ndarray) -> np.ndarray:
    """Of speech, for each step of 32 ms. The state and some samples go from step to step."""
    state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, BEFORE), np.float32)
    found = []
    for start in range(0, len(sound) - STEP + 1, STEP):
        x = np.concatenate([context, sound[None, start : start + STEP]], axis=1)
        p, state = model.run(input=x, state=state, sr=np.array(RATE))
        context = x[:, -BEFORE:]
        found.append(p.item())
    return np.array(found)


def main() -> None:
    rng = np.random.default_rng(0)
    if len(sys.argv) > 1:
        sound = read(sys.argv[1])
    else:
        hiss = rng.normal(0, 0.003, 2 * RATE).astype(np.float32)
        sound = np.concatenate([hiss[:RATE], vowels(2.0, rng), hiss])
    model = rlx.load("silero-vad")
    assert isinstance(model, rlx.OnnxModel)
    speaks = probabilities(model, sound) > SPEECH
    edges = np.flatnonzero(np.diff(np.concatenate([[0], speaks.astype(int), [0]])))
    for first, last in edges.reshape(-1, 2):
        print(f"speech from {first * STEP / RATE:.2f} to {last * STEP / RATE:.2f} s")
    print(f"{speaks.mean():.0%} of {len(sound) / RATE:.1f} s")


if __name__ == "__main__":
    main()

"""Takes docs/chat.png, the page of a server: python tests/docs/chat_picture.py"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "browser"))
from chromium import FLAGS, find_chromium

ROOT = Path(__file__).resolve().parents[2]
PICTURE, SIZE = ROOT / "docs" / "chat.png", {"width": 1100, "height": 620}
QUESTION = "Write a Python function that returns the larger of two numbers."


def take() -> bytes:
    """The page at the end of an answer."""
    command = [sys.executable, "-m", "rlx", "serve", "smollm2-135m", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        address = next(json.loads(line)["address"] for line in server.stderr if "listening" in line)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
            page.goto(address)
            page.get_by_label("System prompt").fill("Answer in two sentences and with code.")
            page.get_by_label("Temperature").fill("0")
            for _ in range(2):  # the first loads the model
                page.get_by_role("button", name="Clear").click()
                page.get_by_label("Message").fill(QUESTION)
                page.keyboard.press("Enter")
                page.locator("article.assistant:not(.busy)").wait_for(timeout=120_000)
            page.locator("#talk").evaluate("(box) => { box.scrollTop = 0 }")
            return page.screenshot()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    shown = Image.open(io.BytesIO(take())).convert("RGB").quantize(64)
    shown.save(PICTURE, optimize=True)

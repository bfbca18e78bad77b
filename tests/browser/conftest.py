"""A browser, pages that must stay quiet, and the report on the default model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import FLAGS, LAPTOP, PHONE, find_chromium
from playwright.sync_api import Browser, Page, sync_playwright
from typer.testing import CliRunner

from rlx.cli.app import app
from rlx.formats.catalogue import DEFAULT

HERE = ("file:", "data:", "blob:")


@pytest.fixture(scope="module")  # while it is there, an event loop runs: not beside other tests
def browser() -> Iterator[Browser]:
    path = find_chromium()
    assert path is not None, "no browser; python tests/install.py gets one"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rlx inspect smollm2-135m --html` writes."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    done = CliRunner().invoke(app, ["inspect", DEFAULT, "--html", str(file)], prog_name="rlx")
    assert done.exit_code == 0, done.output
    return file


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a file; at the end no page may have complained or asked for anything else."""
    pages: list[Page] = []
    faults: list[str] = []

    def call(file: Path, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Page:
        viewport = {"width": size[0], "height": size[1]}
        page = browser.new_page(
            viewport=viewport, color_scheme=scheme, has_touch=size == PHONE, reduced_motion="reduce"
        )
        pages.append(page)
        page.on("console", lambda m: faults.append(m.text) if m.type != "info" else None)
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith(HERE) else faults.append(r.url))
        page.goto(file.as_uri())
        return page

    yield call
    for page in pages:
        page.close()
    assert faults == []

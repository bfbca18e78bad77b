"""The report on the default model in a real browser, as its reader uses it."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import LAPTOP, PHONE
from PIL import Image
from playwright.sync_api import Locator, Page, expect

import rlx
from rlx.formats.fetch import fetch
from rlx.models.builder import SAMPLE, build_graph
from rlx.models.model_file import ModelFile
from rlx.viz.report import make_report, write_page

LAYERS, CONTEXT = 30, 4096
CHARTS = ("arena-chart", "roofline-chart")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


def block(page: Page, path: str) -> Locator:
    return page.locator(f'details.block[data-block="{path}"]')


def draw(page: Page, chart: str) -> Locator:
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    page.locator(f"#{chart}[data-drawn]").wait_for()
    return page.locator(f"#{chart}")


def point_at(page: Page, chart: Locator, x: float, y: float) -> str:
    """What the picture says about a place, in the units of its axes."""
    chart.scroll_into_view_if_needed()
    left, top = page.evaluate(
        """([id, x, y]) => {
          const { frame, el } = Bokeh.index.find_one(figures[id]);
          const { left, top } = el.getBoundingClientRect();
          return [left + frame.x_scale.compute(x), top + frame.y_scale.compute(y)];
        }""",
        [chart.get_attribute("id"), x, y],
    )
    page.mouse.move(left, top)
    tip = page.locator(".bk-tooltip-content")
    tip.first.wait_for()
    return "\n".join(tip.all_inner_texts())


def data_of(file: Path) -> Any:
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


def pixels(of: Page | Locator, mode: str = "RGB") -> Any:
    return np.array(Image.open(io.BytesIO(of.screenshot())).convert(mode))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_two_times_are_explained(open_page: Any, report: Path) -> None:
    """What the blocks add up to, the whole run, and what lies between: the time at barriers."""
    page, measured = open_page(report), data_of(report)["measured"]
    inside = sum(k["seconds"] for k in measured["kernels"])
    waiting = measured["seconds"] - inside
    shown = re.findall(r"([\d.]+ )(µs|ms|s)\b", page.locator("#model-text").inner_text())
    unit = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
    found = [float(number) * unit[name] for number, name in shown]
    # of two digits at least
    assert found == pytest.approx([inside, measured["seconds"], waiting], rel=0.05)
    tiles = page.locator("#tiles").inner_text()
    assert "".join(shown[1]) in tiles and "a run, waiting included" in tiles


def test_it_opens_at_once(open_page: Any, report: Path) -> None:
    """In two seconds, a model of more than 28 layers, charts and all."""
    page = open_page(report)
    ready = float(page.locator("html").get_attribute("data-ready"))
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    begin = page.evaluate("performance.now()")
    for chart in CHARTS:
        draw(page, chart)
    drawing = page.evaluate("performance.now()") - begin
    assert max(ready, loaded) + drawing < 2000
    assert page.title() == "smollm2-135m · RLX report"
    page.get_by_text(re.compile(r"^blk\.3 … blk\.29$")).click()
    expect(page.locator("details.block > summary .name", has_text="blk.")).to_have_count(LAYERS)


def test_a_layer_folds_and_opens(open_page: Any, report: Path) -> None:
    page = open_page(report)
    layer = block(page, "blk.0")
    stages = layer.locator("> .inside > .stages > .stage")
    assert stages.count() == 0  # made when it is opened
    layer.locator("> summary").click()
    assert [t[:3] for t in stages.locator("h3").all_inner_texts()] == ["HIR", "MIR", "LIR"]
    boxes = [stage.bounding_box() for stage in stages.all()]
    assert [b["x"] for b in boxes] == sorted(b["x"] for b in boxes)
    assert len({b["y"] for b in boxes}) == 1  # side by side
    assert "hir.attention" in stages.nth(0).inner_text()
    assert "\nattention\n" in stages.nth(1).inner_text()
    plan = stages.nth(2).inner_text()
    for word in ("fused_residual_rms_norm", "via lower_hir › fuse", "f32", "steady state"):
        assert word in plan
    inner = block(page, "blk.0.attention")
    inner.locator("> summary").focus()
    page.keyboard.press("Enter")
    assert "lives" in inner.locator(".stage.lir").inner_text()
    layer.locator("> summary").click()
    assert layer.get_attribute("open") is None
    assert not inner.is_visible()


def test_a_tensor_has_its_offset(open_page: Any, report: Path) -> None:
    """The offset on the page is that of a plan made here."""
    model = ModelFile.open(fetch("smollm2-135m"))
    module = build_graph(model, model.weights(), SAMPLE, context=CONTEXT, kv="f16").module
    binding = rlx.DimBinding(seq=1, past_seq=rlx.UpTo(CONTEXT - 1))
    lir = rlx.Session("cpu").template(module, {"binding": binding}).plan({})
    wanted, offset = next(
        (value, slot.offset)
        for value, slot in lir.slots.items()
        if value.node.origin.block == "blk.7.attention" and slot.kind == "arena"
    )
    page = open_page(report)
    page.get_by_label("Find a tensor").fill("blk.7.attention")
    row = page.locator("#tensors tbody tr", has=page.get_by_text(str(wanted), exact=True))
    assert number(row.locator(".offset").inner_text()) == offset
    row.get_by_role("link").click()
    shown = re.search(r"offset ([\d,]+)", page.locator("li.found").inner_text())
    assert shown is not None
    assert number(shown[1]) == offset


def test_the_slowest_kernel_comes_first(open_page: Any, report: Path) -> None:
    page = open_page(report)
    uses = data_of(report)["measured"]["kernels"]
    slowest = max(uses, key=lambda use: use["seconds"])
    rows = page.locator("#kernel-table tbody tr")
    assert rows.count() == len(uses)
    cells = rows.first.locator("td").all_inner_texts()
    assert (cells[0], number(cells[2])) == (slowest["kernel"], slowest["calls"])
    for cell, amount in ((cells[5], slowest["bytes"]), (cells[6], slowest["flops"])):
        # three digits are shown, two of them behind the point
        assert float(cell) == pytest.approx(amount / slowest["seconds"] / 1e9, rel=0.01, abs=0.006)
    assert "GB/s from memory" in page.locator("#kernels-text").inner_text()
    intensity, speed = slowest["flops"] / slowest["bytes"], slowest["flops"] / slowest["seconds"]
    assert slowest["kernel"] in point_at(page, draw(page, "roofline-chart"), intensity, speed / 1e9)


def test_pictures_name_what_is_under_the_pointer(open_page: Any, report: Path) -> None:
    page = open_page(report)
    chart = draw(page, "arena-chart")
    page.get_by_role("button", name="The whole run").click()
    page.get_by_role("button", name="Only blk.0").click()
    value = next(
        v for v in data_of(report)["arena"]["values"]
        if v["block"] == "blk.0.attention" and v["kind"] == "arena"
    )  # fmt: skip
    middle = (value["first"] + value["last"] + 1) / 2, value["offset"] + value["size"] / 2
    text = point_at(page, chart, middle[0], middle[1] / 1024)
    for word in (value["name"], "blk.0.attention", f"{value['first']}–{value['last']}"):
        assert word in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_can_be_read(open_page: Any, report: Path, size: Any, scheme: str) -> None:
    page = open_page(report, size, scheme)
    block(page, "blk.0").locator("> summary").click()
    for part in page.locator("details.part > summary").all():
        part.click()
    for chart in CHARTS:
        drawn = pixels(draw(page, chart))
        assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 20
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert (np.median(pixels(page, "L")) > 128) == (scheme == "light")
    assert page.evaluate(CONTRAST) == []


def test_the_switch_changes_the_theme(open_page: Any, report: Path) -> None:
    page = open_page(report, LAPTOP, "light")
    switch = page.get_by_role("button", name="Theme")
    seen = []
    for _ in range(3):
        seen.append((switch.get_attribute("data-theme"), bool(np.median(pixels(page, "L")) > 128)))
        switch.click()
    assert seen == [("system", True), ("light", True), ("dark", False)]
    draw(page, "roofline-chart")
    for _ in range(3):
        switch.click()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("drawing.then(() => true)")
    expect(page.locator("#roofline-chart > .bk-Figure")).to_have_count(
        1
    )  # drawn again, not once more
    assert np.median(pixels(page, "L")) < 128


def test_headings_are_an_outline(open_page: Any, report: Path) -> None:
    page = open_page(report)
    block(page, "blk.1").locator("> summary").click()
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map((e) => +e.tagName[1])"
    )
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_names_cannot_run(open_page: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=hit=1></script><script>hit=1</script>"

    def build(g: rlx.GraphModule) -> Any:
        with g.block(hostile):
            return {"y": g.linear(g.input(hostile, [64, 64]), g.param("w", [64, 64]))}

    file = tmp_path / "report.html"
    write_page(file, make_report(rlx.GraphModule.define("net", build), name=hostile))
    page = open_page(file)
    block(page, hostile).locator("> summary").click()
    assert page.locator("h1").inner_text() == hostile
    assert hostile in point_at(page, draw(page, "arena-chart"), 0.5, 8)  # 16 KiB are the input's
    assert page.evaluate("window.hit") is None

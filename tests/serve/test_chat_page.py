"""The page of a running server in a real browser, as its reader uses it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_support import write_tiny
from conftest import TINY, RunningServer
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "browser"))
from chromium import FLAGS, find_chromium

from rlx.serve.model_pool import ModelSpec
from rlx.serve.server_config import ServerConfig

LAPTOP, PHONE = (1280, 800), (375, 740)
CONTRAST = (Path(__file__).resolve().parents[1] / "browser" / "contrast.js").read_text()
CONTEXT, END = 16384, 257  # END: the token that ends an answer
THINKS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)
KEY = "a-key-for-the-page"
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def page_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("page") / "tiny.gguf"
    write_tiny(path, template=THINKS, more={"llama.context_length": CONTEXT})
    specs = tuple(ModelSpec(name, str(path), options=TINY) for name in ("first", "second"))
    running = RunningServer(ServerConfig(models=specs, port=0, shutdown_seconds=5))
    yield running
    running.stop()


@pytest.fixture(scope="module")  # while it is there, an event loop runs: not beside other tests
def browser() -> Iterator[Browser]:
    path = find_chromium()
    assert path is not None, "no browser; python tests/install.py gets one"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser, page_server: RunningServer) -> Iterator[OpenPage]:
    """Opens the page; at the end it may not have complained or asked another host. `more` goes
    into each request for an answer, so that a model of random weights says what a test needs."""
    pages: list[Page] = []
    faults: list[str] = []

    def call(
        size: tuple[int, int] = LAPTOP, scheme: Any = "light", url: str = "", **more: Any
    ) -> Page:
        page = browser.new_page(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme,
            has_touch=size == PHONE, reduced_motion="reduce",
        )  # fmt: skip
        pages.append(page)
        page.set_default_timeout(10_000)
        address = url or page_server.url

        def steered(route: Route) -> None:
            body = json.loads(route.request.post_data or "") | more
            route.continue_(post_data=json.dumps(body))

        page.route("**/v1/chat/completions", steered)
        page.on("console", lambda m: faults.append(m.text))
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.on(
            "request", lambda r: None if r.url.startswith((address, "data:")) else faults.append(r)
        )
        page.goto(address)
        return page

    call.faults = faults  # type: ignore[attr-defined]
    yield call
    for page in pages:
        page.close()
    assert faults == []


def says(text: str) -> str:
    """A grammar whose only sentence is `text`."""
    return f"root ::= {json.dumps(text)}"


def ask(page: Page, text: str = "Hi") -> Any:
    """Send a message with the keyboard; the answer, once it is there."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator("article.assistant:not(.busy)").last.wait_for()
    return page.locator("article.assistant").last


def number(text: str, unit: str) -> float:
    found = re.search(rf"([\d.]+) {unit}", text)
    assert found is not None, text
    return float(found[1])


def test_a_message_waits_for_the_list_of_models(open_page: OpenPage) -> None:
    """It may be sent before the page knows which models there are."""
    page = open_page(grammar=says("Yes."))
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    message = page.get_by_label("Message")
    expect(message).to_be_focused()
    message.fill("Hi")
    page.keyboard.press("Enter")
    expect(page.locator("article.user .body")).to_have_text("Hi")
    assert page.locator("article.assistant").count() == 0
    assert held
    held[0].continue_()
    expect(page.locator("article.assistant:not(.busy) .body")).to_have_text("Yes.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_a_message_is_answered(open_page: OpenPage, size: Any, scheme: str) -> None:
    long = "```python\n" + "x" * 300 + "\n```\n" + "y" * 300
    grammar = says(f"The **answer** is `42`.\n\n- one\n- two\n{long}")
    page = open_page(size, scheme, grammar=grammar, max_tokens=2000)
    answer = ask(page, "Hi\nthere")
    expect(page.locator("article.user .body")).to_have_text("Hi\nthere")
    assert answer.locator("strong").inner_text() == "answer"
    assert answer.locator("p code").inner_text() == "42"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("pre").inner_text() == "x" * 300
    assert answer.locator("h2").inner_text() == "first"
    stats = answer.locator(".stats").inner_text()
    assert number(stats, "tokens/s") > 0 and number(stats, "m?s ") > 0
    assert number(stats, "tokens$") > 650  # a byte is a token; the end is one
    for shown in (False, True):
        if shown and size == PHONE:
            page.get_by_role("button", name="Settings").click()
        elif shown:
            page.get_by_text("Tools", exact=True).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.evaluate("document.documentElement.scrollHeight") <= size[1]
        assert page.evaluate(CONTRAST) == []
    assert page.get_by_label("Temperature").is_visible()


def test_an_answer_comes_in_parts_and_stops(
    open_page: OpenPage, page_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_server.post("/v1/completions", {"model": "first", "prompt": "a", "max_tokens": 1})
    runner = page_server.engine("first").runner
    run = runner.run

    def slow(scheduled: Any) -> Any:
        time.sleep(0.005)  # an answer of all tokens takes longer than the test
        return run(scheduled)

    monkeypatch.setattr(runner, "run", slow)
    page = open_page(logit_bias={str(END): -100}, max_tokens=CONTEXT - 200)
    page.get_by_label("Message").fill("Hi")
    page.get_by_role("button", name="Send").click()
    body = page.locator("article.assistant .body")
    seen = ""
    for _ in range(2):
        expect(body).to_have_text(re.compile(rf"[\s\S]{{{len(seen) + 50},}}"))
        seen = body.inner_text()
    assert page.locator("article.busy").count() == 1
    assert number(page.locator(".stats").inner_text(), "tokens/s") > 0
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".stats")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page_server.wait_idle(2)  # long before all tokens would be there
    kept = body.inner_text()
    page.reload()
    expect(page.locator("article.assistant .body")).to_have_text(kept, use_inner_text=True)


HOSTILE = (
    "<img src=x onerror=hit=1><script>hit=1</script> **<b onclick=hit=1>b</b>** "
    "`<i>` [a](javascript:hit=1)\n# <svg onload=hit=1>\n- </li></ul><iframe srcdoc=x>\n"
    "```<u>\n</code></pre><script>hit=1</script>\n```"
)


def test_hostile_answers_are_text(open_page: OpenPage) -> None:
    page = open_page(grammar=says(HOSTILE))
    answer = ask(page, HOSTILE)
    for tag in ("img", "script", "b", "i", "a", "svg", "iframe", "u"):
        assert page.locator(f"#talk {tag}").count() == 0
    assert answer.locator("strong").inner_text() == "<b onclick=hit=1>b</b>"
    assert answer.locator("pre").inner_text() == "</code></pre><script>hit=1</script>"
    assert "[a](javascript:hit=1)" in answer.inner_text()
    assert page.locator("article.user .body").inner_text() == HOSTILE
    page.reload()  # and again, out of the storage
    expect(page.locator("article.assistant strong")).to_have_text("<b onclick=hit=1>b</b>")
    assert page.evaluate("window.hit") is None


def test_the_policy_forbids_other_scripts(open_page: OpenPage, page_server: Any) -> None:
    policy = page_server.client.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    page = open_page()
    for code in ("eval('hit=1')", "document.body.innerHTML = '<b>x</b>'"):
        tried = f"try {{ {code}; tell('') }} catch (e) {{ tell(String(e)) }}"
        told = page.evaluate(f"() => new Promise((tell) => setTimeout(() => {{ {tried} }}))")
        assert re.search("Content Security Policy|Trusted", told), code
    added = "const s = document.createElement('style'); s.textContent = 'body {display: none}'"
    page.evaluate(f"() => {{ {added}; document.head.append(s); }}")
    assert page.locator("h1").is_visible()
    seen = open_page.faults  # type: ignore[attr-defined]
    assert len(seen) >= 3 and all("Policy" in fault or "Trusted" in fault for fault in seen)
    seen.clear()


def test_settings_reach_the_server_and_stay(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Model", exact=True).select_option("second")
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = ask(page)
    body = sent.value.post_data_json
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("second", 0, 7)
    assert [m["content"] for m in body["messages"]] == ["Be brief.", "Hi"]
    stats = answer.locator(".stats").inner_text()
    assert "7 tokens" in stats and "limit" in stats
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("second")
    assert page.get_by_label("System prompt").input_value() == "Be brief."
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "More")
    assert [m["role"] for m in sent.value.post_data_json["messages"]] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    page.get_by_role("button", name="Clear").click()
    assert page.locator("article").count() == 0
    page.reload()
    assert page.locator("article").count() == 0


def test_lines_and_the_keyboard(open_page: OpenPage) -> None:
    page = open_page(max_tokens=2)
    page.get_by_label("Message").press_sequentially("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.get_by_label("Message").input_value() == "a\nb"
    assert page.locator("article").count() == 0
    page.keyboard.press("Enter")
    expect(page.locator("article.user .body")).to_have_text("a\nb")
    page.locator("article.assistant:not(.busy)").wait_for()
    page.keyboard.press("Enter")  # nothing to send
    assert page.locator("article").count() == 2


def test_reasoning_is_folded(open_page: OpenPage) -> None:
    page = open_page(
        grammar=says("Let me see.</think>Yes."), chat_template_kwargs={"enable_thinking": True}
    )
    answer = ask(page)
    assert answer.locator(".said").inner_text() == "Yes."
    thought = answer.locator("details.thought")
    assert thought.get_attribute("open") is None and not thought.locator("p").is_visible()
    thought.locator("summary").click()
    assert thought.locator("p").inner_text() == "Let me see."


def test_calls_of_tools_are_shown_and_answered(open_page: OpenPage) -> None:
    parameters = {
        "type": "object", "properties": {"day": {"enum": ["today"]}}, "required": ["day"],
        "additionalProperties": False,
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    page = open_page(
        parallel_tool_calls=False, tool_choice="required",
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools as JSON").fill("[")
    page.get_by_label("Message").fill("Hi")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    page.get_by_label("Tools as JSON").fill(json.dumps([tool]))
    answer = ask(page)
    call = answer.locator("figure.call")
    assert call.locator("figcaption span").inner_text() == "calls weather"
    assert json.loads(call.locator("code").inner_text()) == {"day": "today"}
    page.get_by_label("Result of weather").fill("sunny")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    page.locator("article.assistant:not(.busy)").nth(1).wait_for()
    said, result = sent.value.post_data_json["messages"][-2:]
    assert said["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (result["role"], result["content"]) == ("tool", "sunny")


def test_errors_are_shown_as_the_server_says(open_page: OpenPage) -> None:
    page = open_page(top_p=7)
    page.get_by_label("Message").fill("Hi")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("400: Invalid value for 'top_p'")
    assert page.get_by_label("Message").input_value() == "Hi"  # to be sent again
    assert page.locator("article").count() == 0
    seen = open_page.faults  # type: ignore[attr-defined]
    assert len(seen) == 1 and "400" in seen[0]  # the browser's own line
    seen.clear()


def test_a_key_is_asked_for(open_page: OpenPage, start: Any) -> None:
    server = start(keys=(KEY,))
    page = open_page(PHONE, url=server.url, max_tokens=3)
    expect(page.get_by_role("alert")).to_contain_text("401: You didn't provide an API key.")
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model option")).to_have_text(["tiny"])
    expect(page.get_by_role("alert")).to_be_hidden()
    assert "3 tokens" in ask(page).locator(".stats").inner_text()
    assert page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
    assert KEY in page.evaluate("sessionStorage['rlx.key']")
    seen = open_page.faults  # type: ignore[attr-defined]
    assert len(seen) == 1 and "401" in seen[0]
    seen.clear()

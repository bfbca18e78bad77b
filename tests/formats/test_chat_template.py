"""Chat templates: what they give, what they may not do, and how they fail."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import pytest

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.formats.chat_template import ChatTemplate

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""
TALK = [{"role": "user", "content": "Hi <b>&"}, {"role": "assistant", "content": "Yes?"}]


def test_a_conversation() -> None:
    template = ChatTemplate(CHATML)
    text = "<|im_start|>user\nHi <b>&<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    assert template.render(TALK, add_generation_prompt=False) == text
    assert template.render(TALK) == text + "<|im_start|>assistant\n"


def test_what_templates_expect() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{{ extra }}{{ eos_token }}"
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    found = template.render([], tools=[{"name": "é<", "n": 1}], extra=7)
    assert found == '<s>[{"name": "é<", "n": 1}]7</s>'
    assert ChatTemplate("{{ {'b': 1} | tojson(indent=2) }}").render([]) == '{\n  "b": 1\n}'
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([])
    assert abs(int(year) - datetime.datetime.now().year) <= 1
    assert ChatTemplate("{{ undefined_name }}{{ tools }}").render([]) == "None"


def test_extensions() -> None:
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ChatTemplate(marked).render(TALK) == "Hi <b>&Yes?"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ChatTemplate(loop).render([]) == "01"


def test_a_template_may_refuse() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
    template = ChatTemplate(source, where="m.gguf")
    assert template.render(TALK) == "ok"
    with pytest.raises(InputError, match=r"\[m.gguf\] the chat template refuses .*: user first"):
        template.render(TALK[1:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.sys }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_templates_reach_nothing(source: str) -> None:
    with pytest.raises(
        (FormatError, InputError),
        match=r"the sandbox forbids|failed on these messages|takes too much",
    ):
        ChatTemplate(source).render(TALK)


def test_templates_too_deep_to_compile() -> None:
    with pytest.raises(FormatError, match=r"cannot be used|not valid Jinja"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(FormatError, match=r"cannot be used|not valid Jinja"):
        ChatTemplate("{% if 1 %}" * 200 + "{% endif %}" * 200)


def test_syntax_errors_show_the_line() -> None:
    with pytest.raises(FormatError, match=r"\[m, line 2 of the template\] .* got \{% if x %") as e:
        ChatTemplate("fine\n{% if x %\n", where="m")
    assert "not valid Jinja" in e.value.what


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0].a.b.c }}", "{{ 'a' + 1 }}", "{{ messages[9].x.y }}"]
)
def test_faults_at_run_time(source: str) -> None:
    with pytest.raises(InputError, match="the chat template failed on these messages"):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    "messages", ["hi", {"role": "user"}, None, ["hi"], [{"content": "x"}], [{"role": 1}]]
)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(InputError, match=r"are not a list|has no role"):
        ChatTemplate(CHATML).render(messages)


def test_without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        UnsupportedError, match=r"chat needs the library 'jinja2'.*\n.*pip install jinja2"
    ):
        ChatTemplate("x")

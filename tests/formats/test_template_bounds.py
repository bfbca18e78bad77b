"""Hostile chat templates: a typed error after a bounded cost, whatever they try."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlx.errors import FormatError, InputError
from rlx.formats import template_sandbox
from rlx.formats.chat_template import ChatTemplate

TALK = [{"role": "user", "content": "Hi"}]
GROW = "{% set ns = namespace(x='xxxxxxxx', y=[1]) %}{% for i in range(99) %}"
HOSTILE = {
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "rjust, a variable": "{% set n = 2000000000 %}{% set x = 'x'.rjust(n) %}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "center": "{{ 'x'.center(2000000000) }}",
    "center, a filter": "{{ 'x' | center(2000000000) }}",
    "center, of many": "{{ ['x'] | map('center', 2000000000) | list }}",
    "tabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'x\\ny' | indent(2000000000) }}",
    "json": "{{ [[1, 2]] | tojson(indent=2000000000) }}",
    "json, deep": GROW + "{% set ns.y = [ns.y] %}{% endfor %}{% set a = [ns.y] * 2000 %}"
    "{{ (a * 4) | tojson(indent=16) }}",
    "batch": "{{ [1] | batch(2000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(2000000000, 'x') | list }}",
    "round": "{{ 1.5 | round(2000000000, 'floor') }}",
    "repetition": "{{ 'xxxxxxxx' * 500000000 }}",
    "repetition of a list": "{{ ([1] * 100000) * 100000 }}",
    "percent": "{{ '%2000000000d' % 1 }}",
    "percent, precision": "{{ '%.2000000000f' % 1.5 }}",
    "percent, a star": "{{ '%*d' % (2000000000, 1) }}",
    "percent, often": "{{ ('%4000000d' * 100000) % ((1,) * 100000) }}",
    "percent, named": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "percent, a filter": "{{ '%2000000000d' | format(1) }}",
    "format": "{{ '{:2000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 2000000000) }}",
    "format, often": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "format_map": "{{ '{a:2000000000}'.format_map({'a': 1}) }}",
    "replace": "{% set x = 'x' * 1000000 %}{{ x.replace('x', x) }}",
    "replace, a filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 1000000 %}{{ x.join(range(100000) | map('string')) }}",
    "join, a filter": "{% set x = 'x' * 1000000 %}{{ range(100000) | join(x) }}",
    "translate": "{{ 'xxx'.translate({120: 'y' * 1000000}) }}",
    "bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "lorem ipsum": "{{ lipsum(n=100000000) }}",
    "sum of lists": "{{ [[1] * 1000] * 1000 | sum(start=[]) }}",
    "tilde doubles": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus doubles": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list doubles": GROW + "{% set ns.y = ns.y + ns.y %}{% endfor %}",
    "a list holds itself twice": GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y }}",
    "a tuple holds itself twice": GROW + "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ ns.y }}",
    "a dict holds itself twice": GROW + "{% set ns.y = {1: ns.y, 2: ns.y} %}{% endfor %}",
    "lists compared": GROW + "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.y == [ns.y] }}",
    "a block doubles": GROW + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "a filter block doubles": GROW
    + "{% set ns.x | upper %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "numbers double": "{% set ns = namespace(n=3) %}{% for i in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "a range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "nested, none taken": "{% for i in range(99999) %}"
    "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "nested through a filter": "{% for i in range(99999) %}{% set x = range(99999) | sum %}"
    "{% endfor %}",
    "nested through a test": "{% for i in range(99999) %}"
    "{% set x = range(99999) | select('odd') | list %}{% endfor %}",
    "search": "{% set x = 'x' * 4000000 %}{% for i in range(99999) %}{% if 'xy' in x %}"
    "{% endif %}{% endfor %}",
    "slices": "{% set x = [1] * 900000 %}{% for i in range(99999) %}{% set y = x[1:] %}"
    "{% endfor %}",
    "text of the template": "{% for i in range(99999) %}" + "literal text " * 999 + "{% endfor %}",
    "text of a macro": "{% macro m() %}" + "literal text " * 999 + "{% endmacro %}"
    "{% set x %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
    "a macro calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}"
    "{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "a recursive loop over a range": "{% for i in range(99999) recursive %}"
    "{% if loop.depth < 3 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "many names": "".join(f"{{% set a{i} = 'x' * 4000000 ~ {i} %}}" for i in range(100)),
    "when it is compiled": "".join(f"{{{{ 'x' | center({3000000 + i}) }}}}" for i in range(100)),
    "when it is compiled, by operators": "{{ 'x' ~ 'x' * 2000000000 }}",
}


SLOW = ("nested", "search", "slices", "recursive", "twice")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "_SECONDS", 0.5)  # a quarter, to be done sooner
    begin = time.thread_time()
    with pytest.raises((FormatError, InputError)) as caught:
        ChatTemplate(HOSTILE[name], where="m.gguf").render(TALK)
    # the last step before the end is one of 4 million characters at most
    assert time.thread_time() - begin < 1.5
    assert "[m.gguf]" in str(caught.value) and "MemoryError" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_hostile_templates_take_little_memory() -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {__file__.rpartition("/")[0]!r})
from test_template_bounds import HOSTILE, SLOW, TALK
from rlx.errors import FormatError, InputError
from rlx.formats.chat_template import ChatTemplate
ChatTemplate("{{{{ 1 }}}}").render(TALK)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
for name, source in HOSTILE.items():
    if any(word in name for word in SLOW):
        continue
    try:
        ChatTemplate(source).render(TALK)
    except (FormatError, InputError) as e:
        assert "MemoryError" not in str(e), name
    else:
        raise AssertionError(name)
print("all stopped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "all stopped\n", done.stderr


def test_namespaces_in_namespaces_are_not_printed() -> None:
    names = [f"n{i}" for i in range(60)]
    source = "".join(f"{{% set {n} = namespace() %}}" for n in names)
    for a, b in itertools.pairwise(names):
        source += f"{{% set {a}.x = {b} %}}{{% set {a}.y = [{b}, {b}] %}}"
    assert ChatTemplate(source + "{{ n0 }}").render(TALK) == "<Namespace>"


def test_a_template_that_is_too_long() -> None:
    with pytest.raises(FormatError, match="a chat template that is too long"):
        ChatTemplate("x" * (1 << 21))


def test_long_conversations_are_fine() -> None:
    """What people do is far below the bounds: many messages, and a long one."""
    source = (
        "{%- set ns = namespace(all=[], n=0) -%}{%- for m in messages -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- set ns.all = ns.all + [m.role] -%}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>' ~ '\\n' }}"
        "{%- if loop.last or 'z' in m.content or m.content[:2] == 'zz' -%}.{%- endif -%}"
        "{%- endfor -%}{{ ns.n }} {{ ns.all | length }}"
    )
    many = [{"role": "user", "content": f" message {i}"} for i in range(4000)]
    text = ChatTemplate(source).render(many)
    assert text.endswith("message 3999<|im_end|>\n.4000 4000")
    long = "x" * (1 << 24)
    text = ChatTemplate(source).render([{"role": "user", "content": long}] * 3)
    assert text == f"<|im_start|>user\n{long}<|im_end|>\n" * 3 + ".3 3"


PARTS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}"
    "{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}"
    "{{ loop.changed(m.role) }}{% else %}none{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}none{% endfor %}{% for x in [] %}"
    "{% else %}e{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [2, (3, 4)]}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}"
    "{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
    "{% for i in range(9) if i % 2 %}{% if i == 5 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}"
    "{{ f(1) }}{{ f(1, 3, 4, z=5) }}",
    "{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(3) %}{{ y }}!{% endcall %}",
    "{% set ns = namespace(a=1, l=[]) %}{% for i in range(4) %}{% set ns.a = ns.a + i %}"
    "{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.a }}{{ ns.l }}{{ ns.l[1:3] }}{{ ns.l[::-1] }}",
    "{% set x %}a{{ 1 + 1 }}{% endset %}{{ x }}{% set y | upper %}b{% endset %}{{ y }}",
    "{% filter upper | trim %}  shout {{ 'x' }} {% endfilter %}{% with a = 1, b = a %}"
    "{{ b }}{% endwith %}",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ 2.5 ~ [1] }}{{ 'x' * 3 }}{{ [0] * 2 }}{{ 7 // 2 }}{{ 7 / 2 }}",
    "{{ '%s-%05.1f-%(x)s' | replace('%(x)s', 'y') | format('a', 2.25) }}{{ '%d%%' % 3 }}",
    "{{ '{:>4}|{a}'.format(1, a=2) }}{{ 'a-b'.split('-') }}{{ ' x '.strip() }}{{ 'ab'.upper() }}",
    "{{ 'abc'.ljust(5) }}|{{ 'a' | center(5) }}|{{ '7'.zfill(3) }}{{ ', '.join(['a', 'b']) }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto',"
    " 'user') | list | length }}{{ messages | rejectattr('content') | list }}",
    "{{ [3, 1, 2] | sort }}{{ [1, 1] | unique | list }}{{ [1, 2] | sum }}"
    "{{ [1, 2, 3] | batch(2) | list }}",
    "{{ messages | groupby('role') | list | length }}{{ {'b': 1, 'a': 2} | dictsort }}"
    "{{ 'a b' | title }}",
    "{{ 'x' in 'xyz' }}{{ 1 < 2 <= 2 != 3 }}{{ 3 not in [1, 2] }}{{ 'a' if false else 'b' }}",
    "{{ messages is defined }}{{ none is none }}{{ 3 is odd }}{{ 3 is in [3] }}{{ {} is mapping }}",
    "{{ [1.5, -2] | map('abs') | map('round', 1) | list }}{{ 'a\nb' | indent(2) }}{{ '<' | e }}",
    "{{ 'abcdef' | truncate(4, true, '.', 0) }}{{ 'a' | default('z') }}"
    "{{ u | default('z', true) }}",
    "{{ (1, 2) + (3,) }}{{ (1, 'a') }}{{ {'k': messages[0].role} }}{{ -3 }}{{ not true }}",
]


@pytest.mark.parametrize("source", PARTS)
def test_other_templates_do_what_jinja_does(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    talk = [*TALK, {"role": "assistant", "content": ""}]
    expected = plain.from_string(source).render(messages=talk)
    assert ChatTemplate(source).render(talk) == expected

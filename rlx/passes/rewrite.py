"""The rewrite engine: an editor that knows every value's users, and rules applied to a fixpoint.

A rule is a name, a pattern and a function from the match to what replaces the root:

    Rule("double negation", op("neg", op("neg", "x")), lambda m: m.x)

The function builds on `m.g` and returns a value, a tuple of values (one per result of the root), or
None when the rule does not apply after all. The replacement must have the shape and element type of
what it replaces; the engine checks.

A node is param-only when it depends on params and constants alone; `prepare` computes it once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlx.errors import RlxError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Origin, Value
from rlx.ir.op import registrations
from rlx.passes.pattern import Match, OpPattern, matches
from rlx.passes.report import FusionReport
from rlx.support.records import dataclass


def is_param_only(node: Node, known: set[Node]) -> bool:
    """Whether a node is param-only, given the set of `known` param-only nodes before it."""
    op = node.op
    if op.is_source:
        return op.name in ("param", "constant") and node.outputs[0].shape.is_static
    for v in node.inputs:
        if v.node not in known:
            return False
    if op.has_effect or not all(v.shape.is_static for v in node.outputs):
        return False
    return not (op.fields and op.has_symbols)


def param_only_nodes(nodes: Iterable[Node]) -> set[Node]:
    """The param-only nodes among `nodes`, which are in topological order."""
    found: set[Node] = set()
    for node in nodes:
        if is_param_only(node, found):
            found.add(node)
    return found


def size_of(value: Value) -> int:
    """Bytes of a value with a static shape."""
    size = value.shape.size_bytes
    assert isinstance(size, int)
    return size


Result = Any  # a Value, a tuple of them (one per result of the root), or None
OnFire = Callable[[str, "Rule", Node, Sequence[Node]], None]  # pass, rule, replaced node, new nodes

GONE = -1  # the id of a node that left the graph


class Editor:
    """Edits a graph in place. `finish` sorts the nodes topologically and numbers them."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self.users: dict[Value, list[Node]] = {}
        self.returned = Counter(graph.outputs)
        self._positions: dict[Value, list[int]] = {}  # of graph outputs
        for i, value in enumerate(graph.outputs):
            self._positions.setdefault(value, []).append(i)
        self.changed = False
        self._fixed: set[Node] | None = None
        self._touched: dict[Origin, Origin] = {}
        self.stale: set[Value] = set()  # states before a write, and views of them
        users = self.users  # for all nodes what `_enter` does for one, without a call for each
        for node in graph.nodes:
            for value in node.outputs:
                users[value] = []
            for value in node.inputs:
                users[value].append(node)
        # a state before a write -> the write
        self.updates = {n.inputs[0]: n for n in graph.nodes if n.op.name == "state_update"}
        if self.updates:
            for node in graph.nodes:
                self._note_stale(node)

    def _enter(self, node: Node) -> None:
        users = self.users
        for value in node.outputs:
            users[value] = []
        for value in node.inputs:
            users[value].append(node)
        if node.op.name == "state_update":
            self.updates[node.inputs[0]] = node

    def _note_stale(self, node: Node) -> None:
        for value in node.outputs:
            if value in self.updates or (node.op.is_view and node.inputs[0] in self.stale):
                self.stale.add(value)

    # -- queries --------------------------------------------------------------------------------

    def uses(self, value: Value) -> int:
        """How often the value is an operand or a graph output."""
        return len(self.users[value]) + self.returned.get(value, 0)

    def is_param_only(self, value: Value) -> bool:
        """Whether a value depends on params and constants alone, so that `prepare` computes it."""
        if self._fixed is None:
            self._fixed = param_only_nodes([n for n in self.graph.nodes if n.id != GONE])
        return value.node in self._fixed

    def depends(self, node: Node, on: Node) -> bool:
        """Whether `node` needs `on` to run first."""
        seen, todo = {node}, [node]
        while todo:
            for before in self.before(todo.pop()):
                if before is on:
                    return True
                if before not in seen:
                    seen.add(before)
                    todo.append(before)
        return False

    def before(self, node: Node) -> list[Node]:
        """Nodes that run before `node`: its operands, and for a write the readers of old values."""
        found = [v.node for v in node.inputs]
        if self.updates and node.op.name == "state_update":
            todo = [node.inputs[0]]
            while todo:
                for user in self.users[todo.pop()]:
                    if user is not node:
                        found.append(user)
                        if user.op.is_view:
                            todo.extend(user.outputs)
        return found

    # -- changes --------------------------------------------------------------------------------

    def touched(self, origin: Origin) -> Origin:
        """The origin of what is built in place of a node of `origin`."""
        found = self._touched.get(origin)
        if found is None:
            found = self._touched[origin] = origin.touched(self.name)
        return found

    def building(self, root: Node) -> _Building:
        """`with editor.building(root) as new:` nodes built inside are inserted at `root`, with its
        origin, and are in `new` at the end."""
        return _Building(self, root)

    def enter(self, new: Sequence[Node], root: Node) -> None:
        """Take in nodes that were built at `root`."""
        for node in new:
            node.id = root.id
            self._enter(node)
            if self._fixed is not None and is_param_only(node, self._fixed):
                self._fixed.add(node)
            if self.updates:
                self._note_stale(node)
        self.changed = self.changed or bool(new)

    def drop(self, new: Sequence[Node]) -> None:
        """Remove the nodes that were built last."""
        for node in reversed(new):
            for value in node.inputs:
                self.users[value].remove(node)
            for value in node.outputs:
                del self.users[value]
                self.stale.discard(value)
            node.id = GONE
        if new:
            del self.graph.nodes[-len(new) :]

    def allows(self, pairs: Iterable[tuple[Value, Value]], new: Sequence[Node]) -> bool:
        """Whether the change keeps every read of a state before the write that follows it."""
        if not self.stale:
            return True
        if any(by in self.stale and old not in self.stale for old, by in pairs):
            return False  # the reader of `old` may come after the write
        for node in new:
            for value in node.inputs:
                root = _viewed(value)
                update = self.updates.get(root) if value in self.stale else None
                if update is not None and update is not node and self.depends(node, update):
                    return False
        return True

    def replace(self, value: Value, by: Value) -> None:
        """Replace all uses of `value` by `by` and remove nodes that become dead."""
        if value is by:
            return
        old, new = value.shape, by.shape
        if old is not new and not (old.dtype is new.dtype and old.same_dims(new)):
            raise VerifyError(
                "a replacement of another shape", where=self.name, got=f"{by!r} by {by.node}",
                expected=f"{value!r} as {value.node}", origin=value.node.origin,
            )  # fmt: skip
        self.changed = True
        users = self.users[value]
        for user in users:
            user.inputs = tuple([by if v is value else v for v in user.inputs])
            if user.op.name == "state_update" and user.inputs[0] is by:
                self.updates.pop(value, None)
                self.updates[by] = user
        self.users[by].extend(users)
        self.users[value] = []
        if value in self.returned:
            moved = self._positions.pop(value)
            for i in moved:
                self.graph.outputs[i] = by
            self._positions.setdefault(by, []).extend(moved)
            self.returned[by] += self.returned.pop(value)
        self.remove_dead(value.node)

    def redirect(self, user: Node, value: Value, by: Value) -> None:
        """Let one node read `by` instead of `value`, which has other uses."""
        self.changed = True
        count = sum(v is value for v in user.inputs)
        user.inputs = tuple([by if v is value else v for v in user.inputs])
        self.users[by] += [user] * count
        self.users[value] = [u for u in self.users[value] if u is not user]

    def remove_dead(self, node: Node) -> None:
        """Remove `node` if it is dead, then the operands that die with it."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node.id == GONE or is_kept(node) or any(map(self.uses, node.outputs)):
                continue
            node.id = GONE
            self.changed = True
            for value in node.inputs:
                self.users[value].remove(node)
                todo.append(value.node)

    def finish(self) -> Graph:
        """The graph in topological order, keeping the old order where possible."""
        if not self.changed:
            return self.graph
        nodes = [n for n in self.graph.nodes if n.id != GONE]
        nodes.sort(key=lambda n: n.id)
        self.graph.nodes = _inputs_in_order(self._ordered(nodes))
        for i, node in enumerate(self.graph.nodes):
            node.id = i
        self.changed = False
        return self.graph

    def _ordered(self, nodes: list[Node]) -> list[Node]:
        placed: set[Node] = set()
        order: list[Node] = []
        open_: set[Node] = set()
        for first in nodes:
            if first.op.name != "state_update" and all(v.node in placed for v in first.inputs):
                if first not in placed:
                    placed.add(first)
                    order.append(first)
                continue
            todo = [first]
            while todo:
                node = todo[-1]
                if node in placed:
                    todo.pop()
                    continue
                if node.op.name == "state_update":
                    missing = [n for n in self.before(node) if n not in placed]
                else:
                    missing = [v.node for v in node.inputs if v.node not in placed]
                if not missing:
                    placed.add(node)
                    order.append(todo.pop())
                elif node in open_ and any(n in open_ for n in missing):
                    raise VerifyError(
                        "a cycle", where=self.name, got=repr(node), origin=node.origin
                    )
                else:
                    open_.add(node)
                    todo.extend(reversed(missing))
        return order


class _Building:
    """A scope in which nodes are built; an error removes them again."""

    def __init__(self, editor: Editor, root: Node) -> None:
        self._editor, self._root, self._new = editor, root, list[Node]()

    def __enter__(self) -> list[Node]:
        graph, root = self._editor.graph, self._root
        self._start = len(graph.nodes)
        self._outer = graph.set_origin(self._editor.touched(root.origin))
        return self._new

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        graph = self._editor.graph
        graph.set_origin(self._outer)
        nodes = graph.nodes
        if kind is not None:
            del nodes[self._start :]
        elif len(nodes) > self._start:
            self._new += nodes[self._start :]
            self._editor.enter(self._new, self._root)


def is_kept(node: Node) -> bool:
    """Whether a node stays although nothing uses it: effects and named sources."""
    return node.op.has_effect or (node.op.is_source and node.op.name != "constant")


def _inputs_in_order(nodes: list[Node]) -> list[Node]:
    """Restore the order of inputs, which is the signature of a nested graph."""
    inputs = [n for n in nodes if n.op.name == "input"]
    known = sorted(inputs, key=lambda n: n.id)
    return nodes if inputs == known else [*known, *(n for n in nodes if n.op.name != "input")]


def _viewed(value: Value) -> Value:
    while value.node.op.is_view:
        value = value.node.inputs[0]
    return value


@dataclass(frozen=True, slots=True)
class Rule:
    """`owns`: the nodes between root and captures must have no other user."""

    name: str
    pattern: OpPattern
    result: Callable[[Match], Result]
    owns: bool = False


def apply(
    graph: Graph,
    rules: Sequence[Rule],
    name: str,
    report: FusionReport | None = None,
    on_fire: OnFire | None = None,
) -> Graph:
    """Apply `rules` to a fixpoint; `report` lists the rules that fired or nearly did."""
    if not _can_match(graph, _indexed(rules)):
        return graph
    return _Driver(graph, rules, name, report, on_fire).run()


Entry = tuple[Rule, tuple[frozenset[str], ...]]
_tables: dict[tuple[int, int], tuple[Sequence[Rule], dict[str, list[Entry]], int]] = {}


def _indexed(rules: Sequence[Rule]) -> dict[str, list[Entry]]:
    """Rules by the op of their root, each with the op names its operands must be among."""
    kept, known = _tables.get((id(rules), len(rules))), registrations()
    if kept is not None and kept[0] is rules and kept[2] == known:
        return kept[1]
    index: dict[str, list[Entry]] = {}
    for rule in rules:
        rule.pattern.refresh()
        for name in rule.pattern.ops:
            index.setdefault(name, []).append((rule, rule.pattern.needs))
    _tables[id(rules), len(rules)] = (rules, index, known)
    return index


def _can_match(graph: Graph, index: dict[str, list[Entry]]) -> bool:
    """Whether the graph has the ops that some rule looks for."""
    present = {n.op.name for n in graph.nodes}
    return any(
        not any(need.isdisjoint(present) for need in needs)
        for name in present & index.keys()
        for _, needs in index[name]
    )


class _Driver:
    def __init__(
        self,
        graph: Graph,
        rules: Sequence[Rule],
        name: str,
        report: FusionReport | None,
        on_fire: OnFire | None,
    ) -> None:
        self.editor, self.name = Editor(graph, name), name
        self.index = _indexed(rules)
        self.report, self.on_fire = report, on_fire
        self.fired: Counter[str] = Counter()
        self.limit = 20 * len(graph.nodes) + 1000
        self.queue = deque(n for n in graph.nodes if n.op.name in self.index)
        self.waiting = set(self.queue)
        self.misses: dict[tuple[Node, str], str] = {}

    def run(self) -> Graph:
        queue, waiting = self.queue, self.waiting
        known: dict[tuple[str, ...], list[Rule]] = {}
        while queue:
            node = queue.popleft()
            waiting.discard(node)
            if node.id == GONE:
                continue
            ops = (node.op.name, *[v.node.op.name for v in node.inputs])
            rules = known.get(ops)
            if rules is None:
                rules = known[ops] = self._rules(*ops)
            for rule in rules:
                if self._try(rule, node):
                    break
        self._report_misses()
        return self.editor.finish()

    def _rules(self, op: str, *operands: str) -> list[Rule]:
        """The rules that may match a node with an op of this name on results of such ops."""
        return [r for r, needs in self.index[op] if not any(n.isdisjoint(operands) for n in needs)]

    def _try(self, rule: Rule, root: Node) -> bool:
        for match in matches(rule.pattern, self.editor, root):
            if self._use(rule, root, match):
                return True
        return False

    def _use(self, rule: Rule, root: Node, match: Match) -> bool:
        other = match.owned() if rule.owns else None
        if other is not None:
            value, why = other
            self.misses[root, rule.name] = f"the {value.node.op.name} inside {why}"
            return False
        try:
            with self.editor.building(root) as new:
                result = rule.result(match)
        except RlxError as e:  # the op does not take these operands: no rewrite
            self.misses[root, rule.name] = f"[{e.where}] {e.what}; got {e.got}"
            return False
        pairs = _pairs(root, result) + match.also
        if result is None or not self.editor.allows(pairs, new):
            self.editor.drop(new)
            if match.reason:
                self.misses[root, rule.name] = match.reason
            return False
        self._fire(rule, root, new, pairs)
        return True

    def _fire(
        self, rule: Rule, root: Node, new: Sequence[Node], pairs: list[tuple[Value, Value]]
    ) -> None:
        self.fired[rule.name] += 1
        if self.fired.total() > self.limit:
            often = ", ".join(f"{n} ({c} times)" for n, c in self.fired.most_common(3))
            raise VerifyError("rules do not reach a fixpoint", where=self.name, got=often)
        if self.report is not None:
            self.report.add(rule.name, root.origin)
        if self.on_fire is not None:
            self.on_fire(self.name, rule, root, new)
        users = self.editor.users
        touched = [v for n in (root, *new) for v in n.inputs]
        if root.name and pairs and pairs[0][1].node in new:
            pairs[0][1].node.name = root.name
        for old, by in pairs:
            moved = list(users[old])
            self.editor.replace(old, by)
            self._enqueue(moved)
        self._enqueue(new)
        for value in touched:
            # an operand with few users may be owned by one of them now; try those again
            if len(users.get(value, ())) <= 4:
                self._enqueue(users.get(value, ()))

    def _enqueue(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.op.name in self.index and node not in self.waiting and node.id != GONE:
                self.waiting.add(node)
                self.queue.append(node)

    def _report_misses(self) -> None:
        if self.report is None:
            return
        for (root, rule), why in self.misses.items():
            if root.id != GONE:
                self.report.miss(rule, why, root.origin)


def _pairs(root: Node, result: Result) -> list[tuple[Value, Value]]:
    if result is None:
        return []
    values = result if isinstance(result, tuple) else (result,)
    return list(zip(root.outputs, values, strict=True))

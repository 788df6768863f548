"""The paths of a norm's value through the statements of a method, for as long as it may wait.

Along them only statements run that change no tensor. A value goes from one round of a loop over children to the next.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from kgopt.rewrite.source.modulated.forms import Forms
from kgopt.rewrite.source.modulated.values import Value
from kgopt.rewrite.source.syntax.expressions import called_of, is_name, reads_value
from kgopt.rewrite.source.syntax.names import forgets, loads, reads, walk, writes
from kgopt.rewrite.source.syntax.quiet import is_harmless, is_quiet

Place = tuple[list[ast.stmt], ast.stmt]  # a block, and one of its statements

# Methods of a site that take what waits as an argument.
_TAKE = {
    *("times", "plus", "times_in_place", "plus_in_place", "times_by", "plus_by", "addcmul", "of"),
    *("now", "then", "skip", "step", "view", "view_by", "like", "dtype_of"),
}


@dataclass
class Loop:
    """A loop over children, and the block that it stands in."""

    block: list[ast.stmt]
    statement: ast.For | ast.While


class Paths:
    """Those of one value; ``loop``: in whose body they are."""

    def __init__(self, value: Value, loop: Loop | None) -> None:
        self.value, self.site, self.method = value, value.site, value.site.method
        self.loop = loop
        self.forms = Forms(value)
        self.goes_on: list[str] = []  # variables that wait where a round of the loop is left
        self.body: list[ast.stmt] = []  # in which all paths come together

    def run(self, path: list[Place], is_inner: bool) -> bool:
        """Goes from the statement at the end of ``path`` to the end of the method, or of the loop or with block that
        ``is_inner``; whether the value may wait at all.
        """
        body, statement = path[0][0], path[-1][1]
        self.body = body
        edit = self.forms.begin(statement)
        if edit is None:
            return False
        self.value.edits[statement] = edit
        name = edit.waits
        for block, place in reversed(path):
            if name is not None:
                name = self._follow(block, block.index(place) + 1, name)
        if self.loop is not None:
            # The next round begins with what waits at the end of this one.
            at_end = [] if name is None else [name]
            for waits in dict.fromkeys([*self.goes_on, *at_end]):
                self._follow(body, 0, waits)
                self._leave(self.loop, waits)
        elif name is not None and is_inner:
            self.value.ends.append((body, body[-1], name))
        return True

    def _follow(self, block: list[ast.stmt], start: int, name: str) -> str | None:
        """Goes through a block; the variable that waits at its end."""
        waits: str | None = name
        for s in block[start:]:
            if waits is not None:
                waits = self._behind(block, s, waits)
        return waits

    def _behind(self, block: list[ast.stmt], s: ast.stmt, name: str) -> str | None:
        """The variable that waits behind a statement in front of which ``name`` does."""
        if s in self.value.edits:  # the round of a loop is complete
            if self._begins_with(s, name):
                self.value.uses.acted = True
            else:
                self.value.stops[s] = block, name
            return None
        is_read = reads_value(s, name)
        written = self.site.written.get(s)
        if written is not None and is_read and self._is_operand(s, name):
            waits, other = written
            if other is not None:  # what that value does here, this one does, too
                self.value.between += other.between
                self.value.uses.scaled = True
            return waits
        if isinstance(s, ast.If) and not reads_value(s.test, name) and self._is_quiet(s.test):
            self.value.asked.append((s.test, name))
            ends = [self._follow(branch, 0, name) for branch in (s.body, s.orelse)]
            return None if ends == [None, None] else name
        if isinstance(s, (ast.Continue, ast.Break)) and self.loop is not None:
            self.goes_on.append(name)
            return None
        self.value.asked.append((s, name))
        if not is_read:
            if forgets(s, name):
                return None
            if name not in writes(s) and is_harmless(self.method, s, self.value.between):
                return name
        # A statement that is written for another value (``1 + gamma``, inside of what that takes) needs the tensor.
        edit = self.forms.take(s, name, block is self.body) if written is None else None
        if edit is None:
            self.value.stops[s] = block, name
            return None
        self.value.edits[s] = edit
        return edit.waits

    def _is_quiet(self, e: ast.expr) -> bool:
        return is_quiet(self.method, e, self.value.between)

    def _leave(self, loop: Loop, name: str) -> None:
        """What waits at the end of a loop's rounds goes into the sum behind the loop, or is computed."""
        at = loop.block.index(loop.statement) + 1
        follower = loop.block[at] if at < len(loop.block) else None
        is_free = isinstance(follower, (ast.Assign, ast.Return)) and follower not in self.value.edits
        edit = None
        if is_free and follower not in self.site.written and self.value.is_modulated:
            uses = self.value.uses
            noted = uses.scaled, uses.shifted
            edit = self.forms.read(follower, name)
            self.value.uses.scaled, self.value.uses.shifted = noted
        if edit is None or edit.waits is not None:
            self.value.ends.append((loop.block, loop.statement, name))
        else:
            self.value.edits[follower] = edit  # type: ignore[index]

    def _begins_with(self, s: Any, name: str) -> bool:
        """``x = norm(x)``, as it came: what waits may go into it."""
        value = s.value
        is_open = isinstance(value, ast.Call) and self.site.begins.is_open(value.func) and len(value.args) == 1
        return is_open and is_name(value.args[0], name) and name not in reads(value.func)

    def _is_operand(self, s: ast.stmt, name: str) -> bool:
        """Whether all that reads a variable in a statement are methods of sites, or it is returned as it is."""
        taken = {id(s.value)} if isinstance(s, ast.Return) else set()
        for node in walk(s):
            site, verb = called_of(node)
            if verb in _TAKE and site.startswith(self.site.name):
                taken |= {id(a) for a in node.args}
        return all(id(n) in taken for n in loads(s, name))

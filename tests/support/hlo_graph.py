"""Order of operations in a compiled program, read from its text."""

import re
from dataclasses import dataclass, field

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
CALLED = re.compile(
    r"(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation)="
    r"\{?(%[\w.-]+(?:, %[\w.-]+)*)"
)
ARRAY = re.compile(r"\b(?:pred|[fsu]\d+|bf16)\[([\d,]*)\]")
BEFORE = re.compile(r"control-predecessors=\{([^}]*)\}")


@dataclass
class Instruction:
    """One of a program.

    Attributes:
      name: its own.
      result: the type of what it gives, as printed.
      kind: of operation.
      scope: of its trace, ``jit(f)/.../name``.
      before: instructions of the same computation that it waits for.
      called: computations that it runs.
    """

    name: str
    result: str
    kind: str
    scope: str
    before: list[str]
    called: list[str]

    @property
    def num_elements(self) -> int:
        """Of all arrays of the result together."""
        total = 0
        for shape in ARRAY.findall(self.result):
            size = 1
            for length in filter(None, shape.split(",")):
                size *= int(length)
            total += size
        return total


@dataclass
class Graph:
    """The instructions of a program's entry, and those that they run.

    Attributes:
      entry: by name.
      computations: the instructions of each, by its name.
    """

    entry: dict[str, Instruction] = field(default_factory=dict)
    computations: dict[str, list[Instruction]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "Graph":
        """The graph of ``compiled.as_text()``."""
        graph, own, is_entry = cls(), [], False
        for line in text.splitlines():
            head = re.match(r"^(ENTRY )?%([\w.-]+) \(.*\{$", line)
            if head is not None:
                is_entry = head[1] is not None
                own = graph.computations.setdefault(head[2], [])
                continue
            result = INSTRUCTION.match(line)
            if result is None:
                continue
            instruction = _instruction(*result.groups())
            own.append(instruction)
            if is_entry:
                graph.entry[instruction.name] = instruction
        assert graph.entry
        return graph

    def before(self, name: str) -> set[str]:
        """All instructions of the entry that have to be done before this one begins."""
        result, left = set(), [name]
        while left:
            for earlier in self.entry[left.pop()].before:
                if earlier not in result:
                    result.add(earlier)
                    left.append(earlier)
        return result

    def unordered(self, a: Instruction, b: Instruction) -> bool:
        """Neither waits for the other."""
        return a.name not in self.before(b.name) and b.name not in self.before(a.name)

    def collectives(self) -> list[Instruction]:
        """Collectives of the entry; none may be hidden in what it calls."""
        own = [x for x in self.entry.values() if x.kind.removesuffix("-start") in COLLECTIVES]
        all_of_them = sum(
            x.kind.removesuffix("-start") in COLLECTIVES
            for computation in self.computations.values()
            for x in computation
        )
        assert len(own) == all_of_them
        return own

    def products(self) -> list[tuple[Instruction, str]]:
        """Instructions of the entry that multiply matrices, and the scope of each product."""
        return [
            (instruction, scope)
            for instruction in self.entry.values()
            for scope in self._products_in(instruction)
        ]

    def _products_in(self, instruction: Instruction) -> set[str]:
        inner = (x for name in instruction.called for x in self.computations[name])
        scopes = set().union(*map(self._products_in, inner))
        return scopes | {instruction.scope} if instruction.kind == "dot" else scopes


def _instruction(name: str, result: str, kind: str, rest: str) -> Instruction:
    operands, _, attributes = rest.partition(")")
    scope = re.search(r'op_name="([^"]*)"', attributes)
    after = BEFORE.search(attributes)
    return Instruction(
        name=name,
        result=result,
        kind=kind,
        scope="" if scope is None else scope[1],
        before=re.findall(r"%([\w.-]+)", operands + ("" if after is None else after[1])),
        called=[
            called
            for names in CALLED.findall(attributes)
            for called in re.findall(r"%([\w.-]+)", names)
        ],
    )

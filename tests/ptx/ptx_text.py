"""Reads preprocessed PTX: statements, scopes, labels and the flow between them.

Just enough of the language for this project's sources: one entry a file, no functions, no arrays
of registers but `%name<N>` declarations.
"""

import dataclasses
import re

REGISTER = re.compile(r"%[a-z]+_\w+")
# Instructions whose first operand is read, not written.
NO_DESTINATION = (
    "st.",
    "red.",
    "bar.",
    "bra",
    "ret",
    "cp.async",
    "fence",
    "nanosleep",
    "mbarrier.init",
)
NO_DESTINATION += ("mbarrier.arrive", "exit", "trap", "membar", "discard", "prefetch")


@dataclasses.dataclass(frozen=True)
class Register:
    """A declared register; two of one name in different scopes are two registers."""

    name: str
    type: str
    scope: int


@dataclasses.dataclass
class Statement:
    """One instruction, its registers resolved to declarations."""

    text: str
    guard: Register | None
    opcode: str
    writes: list[Register]
    reads: list[Register]
    scope: int
    targets: list[int] = dataclasses.field(default_factory=list)  # indices of statements


@dataclasses.dataclass
class Entry:
    """The body of one kernel."""

    name: str
    statements: list[Statement]
    registers: list[Register]
    hidden: list[str]  # names declared again inside the scope of another of the same name


# What a source consists of, in the order in which to try: space, braces, labels, the entry's head,
# directives that end with the line, and statements up to their semicolon.
SPACE, BRACE, LABEL, ENTRY, DIRECTIVE, STATEMENT = (
    re.compile(pattern)
    for pattern in (
        r"\s+",
        r"[{}]",
        r"[A-Za-z_]\w*:",
        r"\.visible\s+\.entry\s+\w+\s*\([^)]*\)[^{]*",
        r"\.(?:version|target|address_size)[^\n]*",
        r"[^;]*;",
    )
)


def pieces(text: str):
    """Statements, labels, braces and the entry's head of a preprocessed source, in order."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    text = re.sub(r"^#[^\n]*$", " ", text, flags=re.M)
    at = 0
    while at < len(text):
        for kind in (SPACE, BRACE, LABEL, ENTRY, DIRECTIVE, STATEMENT):
            if match := kind.match(text, at):
                break
        else:
            raise ValueError(f"no statement ends after: {text[at : at + 60]!r}")
        if kind not in (SPACE, DIRECTIVE):
            yield " ".join(match.group().split())
        at = match.end()


class _Scopes:
    """Nested scopes with what is declared and labelled in each."""

    def __init__(self):
        self.parent = [None]
        self.names = [{}]
        self.labels = [{}]
        self.current = 0
        self.hidden = []

    def open(self):
        self.parent.append(self.current)
        self.names.append({})
        self.labels.append({})
        self.current = len(self.parent) - 1

    def close(self):
        self.current = self.parent[self.current]

    def find(self, tables, name, scope):
        while scope is not None:
            if name in tables[scope]:
                return tables[scope][name]
            scope = self.parent[scope]
        return None

    def declare(self, name, type_):
        if self.find(self.names, name, self.current) is not None:
            self.hidden.append(name)
        register = Register(name, type_, self.current)
        self.names[self.current][name] = register
        return register


def _declarations(piece, scopes):
    _, type_, names = piece.rstrip(";").split(" ", 2)
    for name in (n.strip() for n in names.split(",")):
        if match := re.fullmatch(r"(%\w+)<(\d+)>", name):
            yield from (scopes.declare(f"{match[1]}{i}", type_) for i in range(int(match[2])))
        else:
            yield scopes.declare(name, type_)


def _split_operands(rest):
    """Operands, with vectors and addresses kept whole."""
    return [o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", rest) if o.strip()]


def _statement(piece, scopes):
    def registers(text):
        found = (scopes.find(scopes.names, n, scopes.current) for n in REGISTER.findall(text))
        return [r for r in found if r is not None]

    body, guard = piece.rstrip(";").strip(), None
    if match := re.match(r"@(!?%\w+)\s+", body):
        guard, body = registers(match[1])[0], body[match.end() :]
    opcode, _, rest = body.partition(" ")
    operands = _split_operands(rest)
    writes = []
    if operands and not opcode.startswith(NO_DESTINATION) and not operands[0].startswith("["):
        writes = registers(operands.pop(0))
    reads = [r for operand in operands for r in registers(operand)]
    return Statement(
        piece, guard, opcode, writes, ([guard] if guard else []) + reads, scopes.current
    )


def parse(text: str) -> Entry:
    """The one entry of a preprocessed source."""
    scopes, statements, registers, name = _Scopes(), [], [], ""
    for piece in pieces(text):
        if piece == "{":
            scopes.open()
        elif piece == "}":
            scopes.close()
        elif piece.startswith(".visible"):
            name = piece.replace("(", " ").split()[2]
        elif piece.endswith(":"):
            scopes.labels[scopes.current][piece[:-1]] = len(statements)
        elif piece.startswith(".reg"):
            registers += _declarations(piece, scopes)
        elif not piece.startswith((".shared", ".extern", ".param")):
            statements.append(_statement(piece, scopes))
    _link(statements, scopes)
    return Entry(name, statements, registers, scopes.hidden)


def _link(statements, scopes):
    """Fills in where each statement can go next; the index past the end means: fell off."""
    for index, statement in enumerate(statements):
        if statement.opcode == "ret":
            statement.targets = [] if statement.guard is None else [index + 1]
        elif statement.opcode.startswith("bra"):
            label = statement.text.rstrip(";").split()[-1]
            target = scopes.find(scopes.labels, label, statement.scope)
            if target is None:
                raise ValueError(f"no label {label} in reach of: {statement.text}")
            statement.targets = [target] + ([index + 1] if statement.guard else [])
        else:
            statement.targets = [index + 1]

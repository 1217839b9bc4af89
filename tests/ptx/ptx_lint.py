"""The project's rules on PTX that no assembler checks; each check returns its findings."""

import re

from ptx_text import Entry, Register, parse

PREFIXES = {"%p_": (".pred",), "%r_": (".b32", ".u32"), "%rd_": (".b64", ".u64")}
PREFIXES |= {"%f_": (".f32", ".b32"), "%v_": (".b32", ".u32")}

# Source lines that order memory between threads, blocks, devices or proxies.
SYNC = re.compile(
    r"\b(LD_ACQUIRE\w*|LD_RELAXED\w*|ST_RELEASE\w*|ST_RELAXED\w*|ATOM_\w+|RED_\w+|FENCE_\w+|"
    r"BLOCK_BARRIER\w*|WARP_BARRIER|BULK_\w+|MBARRIER_\w+)\b"
)
# Spellings that memory.ptxh alone may use.
RAW = re.compile(
    r"\b(ld\.(acquire|relaxed|volatile|mmio)|st\.(release|relaxed|volatile|mmio)|ld\.volatile|"
    r"atom\.|red\.(?!sync)|fence\b|membar|cp\.async|mbarrier\.|bar\.|barrier\.)"
)


def lint_source(text: str, owns_spellings: bool = False) -> list[str]:
    """Rules on one source file as written. `owns_spellings`: it is memory.ptxh."""
    findings = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        code = line.split("//")[0]
        if len(line) > 100:
            findings.append(f"line {number}: {len(line)} columns")
        if not owns_spellings and (match := RAW.search(code)):
            findings.append(f"line {number}: {match.group()} outside memory.ptxh")
        if re.search(r"\b(ld|st)\.\S+ .*\[[^\]]*(%rd_flag|%rd_join|ABI_POOL_)", code):
            findings.append(f"line {number}: plain access to a flag or control word")
        if not owns_spellings and not code.lstrip().startswith("#") and SYNC.search(code):
            findings += _comment_missing(lines, number)
    return findings


def _comment_missing(lines, number):
    """A synchronising line has a comment on it, or above the run of such lines it is in."""
    above = number - 1
    if "//" in lines[above]:
        return []
    while above > 0 and SYNC.search(lines[above].split("//")[0]):
        above -= 1
    if "//" in lines[above]:
        return []
    return [f"line {number}: no comment says what is ordered: {lines[number - 1].strip()}"]


def lint_entry(text: str) -> list[str]:
    """Rules on one preprocessed kernel."""
    entry = parse(text)
    return (
        [f"{name} hides another register of that name" for name in entry.hidden]
        + _prefixes(entry)
        + _flow(entry)
        + _unused(entry)
    )


def _prefixes(entry: Entry):
    def fits(register):
        return register.type in PREFIXES.get(register.name.split("_")[0] + "_", ())

    return [
        f"{r.name} is declared {r.type}: the prefix says otherwise"
        for r in entry.registers
        if not fits(r)
    ]


def _unused(entry: Entry):
    read = {r for s in entry.statements for r in s.reads}
    touched = read | {r for s in entry.statements for r in s.writes}
    return [f"{r.name} is never used" for r in entry.registers if r not in touched]


def _is_pool_address(statement, tainted):
    """Whether the statement's result may point into memory that peers write."""
    if statement.opcode.startswith("ld."):
        # Addresses come out of the pool table and the lists; parameters hold XLA's own arrays.
        loads_address = statement.opcode.endswith(".u64")
        return loads_address and not statement.opcode.startswith("ld.param")
    return any(r in tainted for r in statement.reads if r.name.startswith("%rd_"))


def _flow(entry: Entry):
    """Forward analysis: what may have been written, and what may point into a pool."""
    statements = entry.statements
    nothing: frozenset[Register] = frozenset()
    states = {0: (nothing, nothing)}
    pending = [0]
    while pending:
        index = pending.pop()
        if index == len(statements):
            continue
        statement = statements[index]
        written, tainted = states[index]
        if statement.writes:
            pool = _is_pool_address(statement, tainted)
            cleared = tainted if statement.guard else tainted - set(statement.writes)
            tainted = cleared | (set(statement.writes) if pool else nothing)
            written = written | set(statement.writes)
        for target in statement.targets:
            old = states.get(target, (nothing, nothing))
            new = (old[0] | written, old[1] | tainted)
            if states.get(target) != new:
                states[target] = new
                pending.append(target)
    return _judge(entry, states)


def _judge(entry, states):
    findings = []
    if len(entry.statements) in states:
        findings.append(f"{entry.name} can run past its end without ret")
    for index, statement in enumerate(entry.statements):
        if index not in states:
            findings.append(f"never reached: {statement.text}")
            continue
        written, tainted = states[index]
        findings += [
            f"{r.name} is read but never written before: {statement.text}"
            for r in statement.reads
            if r not in written
        ]
        if ".nc" in statement.opcode and any(r in tainted for r in statement.reads):
            findings.append(f".nc load of memory that peers write: {statement.text}")
    return findings

"""Writes the API reference, from the docstrings: ``python -m tests.reference FOLDER``, a Markdown page a verb.

It ends with status 1 where a docstring names a parameter that there is not, leaves one out, or refers to a name that cannot
be found. A tool of its own, as docstrings here mix Google's sections with reStructuredText's tables, which GitHub shows as
they are in a block of text, and as what it checks is half of it.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

MODULES = (
    *("rollpack", "rollpack.torch", "rollpack.testing", "rollpack.names", "rollpack.ray", "rollpack.report"),
    *(f"rollpack.integrations.{name}" for name in ("padded", "verl", "trl", "skyrl", "tinker", "slime", "miles")),
)
ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?([\w.]+)`")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Warns):$", flags=re.MULTILINE)


def public(module):
    """Name and object of each function and class that a user imports from the module."""
    names = getattr(module, "__all__", None)
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if (inspect.isclass(value) or inspect.isroutine(value)) and (name in names if names else own):
            yield name, value


def members(value):
    """Public methods and properties that the class itself describes."""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, function


def described(doc, section):
    """The names that stand in a section: its least indented lines, up to the colon; those of one line by commas."""
    found = re.search(rf"^{section}:\n((?: .*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
    lines = re.findall(r"^ {4}(\S[^:]*):", found.group(1), flags=re.MULTILINE) if found else []
    return [name.strip(" *`") for line in lines for name in line.split(",")]


def faults(where, value, module, owner=None):
    """What is wrong with the docstring, a line each."""
    doc = inspect.getdoc(value) or ""
    if not doc:
        yield f"{where}: no docstring"
    function = value.__init__ if inspect.isclass(value) else value
    parameters = (
        set(inspect.signature(function).parameters) - {"self", "cls", "args", "kwargs"} if callable(function) else set()
    )
    named = described(doc, "Args")
    for name in named:
        if name not in parameters | {"args", "kwargs"}:
            yield f"{where}: describes {name}, and takes no such argument"
    for name in sorted(parameters - set(named)) if named else ():
        yield f"{where}: does not describe {name}"
    for target in ROLE.findall(doc):
        if not found(target, module, owner):
            yield f"{where}: refers to {target}, which is not there"


def found(target, module, owner):
    """Whether the name of a role can be reached: from the class, from the module, or as a whole path."""
    starts = [(owner, target), (module, target)]
    parts = target.split(".")
    for length in range(1, len(parts)):
        try:
            starts.append((importlib.import_module(".".join(parts[:-length])), ".".join(parts[-length:])))
        except ModuleNotFoundError:
            continue
    try:
        importlib.import_module(target)
    except ModuleNotFoundError:
        return any(start is not None and reach(start, path) for start, path in starts)
    return True


def reach(start, path):
    for name in path.split("."):
        fields = getattr(start, "__dataclass_fields__", {})
        if not hasattr(start, name) and name not in fields:
            return False
        start = getattr(start, name, None)
    return True


def markdown(doc):
    """A docstring as Markdown: roles as code, sections as headings of lists, tables as they stand."""
    doc = ROLE.sub(r"`\1`", doc).replace("``", "`")
    doc = re.sub(
        r"^((?:={2,} *)+\n(?:.*\n)+?(?:={2,} *)+\n(?:(?:.+\n)+(?:={2,} *)+(?:\n|$))?)",
        r"```text\n\1\n```\n",
        doc,
        flags=re.MULTILINE,
    )
    head, *sections = SECTION.split(doc)
    text = [head.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        lines = re.sub(r"^ {4}(\S[^:\n]*):", r"- `\1`:", body.strip("\n"), flags=re.MULTILINE)
        text += [f"**{title}**", re.sub(r"^ {4}", "", lines, flags=re.MULTILINE).replace("`` ", "`").replace("``", "`")]
    return "\n\n".join(text)


def page(module, name, value):
    """The page of one name."""
    parts = [f"# {module.__name__}.{name}", *entry(name, value)]
    for method, function in members(value):
        parts += [f"## {name}.{method}", *entry(f"{name}.{method}", function)]
    return "\n\n".join(parts) + "\n"


def entry(name, value):
    signature = "" if inspect.isclass(value) and issubclass(value, Exception) else str(inspect.signature(value))
    return [f"```python\n{name}{signature}\n```", markdown(inspect.getdoc(value) or "")]


def main(folder):
    wrong, index = [], ["# API reference"]
    for path in MODULES:
        module = importlib.import_module(path)
        index += [f"## {path}", (inspect.getdoc(module) or "").partition("\n")[0], ""]
        (folder / path).mkdir(parents=True, exist_ok=True)
        for name, value in public(module):
            wrong += faults(f"{path}.{name}", value, module, value)
            for method, function in members(value):
                wrong += faults(f"{path}.{name}.{method}", function, module, value)
            (folder / path / f"{name}.md").write_text(page(module, name, value))
            first = markdown((inspect.getdoc(value) or "").partition("\n")[0])
            index.append(f"- [{name}]({path}/{name}.md): {first}")
    (folder / "index.md").write_text("\n".join(index) + "\n")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "target/reference")))

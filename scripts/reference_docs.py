"""Write the pages of docs/reference/ that follow from the code, or check that they do (--check).

Pages: config.md from rewarm.config, metrics.md from rewarm.metrics, exit-codes.md from rewarm.errors. Field sentences
are read from the source, where they stand under their fields.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

from rewarm import config, errors, metrics
from rewarm.units import format_size

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Made by scripts/reference_docs.py from the code. Change the code, then run it. -->"


def main() -> int:
    """Exit code: 0 when all is as it should be, 1 when --check found a page that is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page differs")
    check = parser.parse_args().check
    stale = []
    for name, text in pages().items():
        path = REFERENCE / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            REFERENCE.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"docs/reference/{name}: {'differs from the code; run scripts/reference_docs.py' if check else 'written'}"
        )
    return 1 if check and stale else 0


def pages() -> dict[str, str]:
    """File name to text."""
    return {"config.md": _config_page(), "metrics.md": _metrics_page(), "exit-codes.md": _exit_codes_page()}


def _config_page() -> str:
    lines = [
        "# Configuration",
        MADE,
        "",
        "A value comes from the first of these that has it: an argument or flag; the server's extra config (vLLM:",
        "`kv_connector_extra_config`); the environment variable; the one TOML file that `--config` or `REWARM_CONFIG`",
        "names; the default. `rewarm config show` prints each value with its origin. An unknown key is an error that",
        "names the nearest known one. Sizes are bytes, or text like `200GiB` and `1.5TB`.",
    ]
    for section in config.SECTIONS:
        sentences = field_sentences(section)
        lines += ["", f"## [{section.SECTION}]", "", inspect.cleandoc(section.__doc__ or ""), ""]
        lines += ["| key | default | variable | meaning |", "|---|---|---|---|"]
        for field in dataclasses.fields(section):
            variable = config.variable_name(section, field.name)
            default = _default_text(field.name, field.default)
            lines.append(f"| `{field.name}` | {default} | `{variable}` | {sentences[field.name]} |")
    lines += ["", "A file:", "", "```toml", "[kv]", 'roots = ["/mnt/nvme0/kv", "/mnt/nvme1/kv"]']
    lines += ['capacity_bytes = "1.5TB"', 'store = "on_reuse"', "```", ""]
    return "\n".join(lines)


def _default_text(name: str, default: object) -> str:
    if default in ((), ""):
        return "none"
    if name.endswith("_bytes") and isinstance(default, int) and default:
        return format_size(default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def field_sentences(cls: type) -> dict[str, str]:
    """Field name to the sentence under it in the source."""
    class_body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(class_body, ast.ClassDef)
    sentences = {}
    for field, sentence in itertools.pairwise(class_body.body):
        match field, sentence:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                sentences[name] = " ".join(text.split())
    return sentences


def _metrics_page() -> str:
    lines = [
        "# Metrics",
        MADE,
        "",
        "Counters end in `_total`; units are seconds and bytes. A label has few values, and never a key or a request.",
        "vLLM serves them on its own `/metrics`, summed over the ranks of a server.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in metrics.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join([*lines, ""])


def _exit_codes_page() -> str:
    meanings = {
        errors.ExitCode.DONE: "done",
        errors.ExitCode.ANSWER_IS_NO: "done, and the answer is no: a check failed, a gate was missed",
        errors.ExitCode.USAGE: "usage: an argument, option or configuration value is wrong; nothing was changed",
        errors.ExitCode.CANNOT: "this machine, platform or version cannot do what was asked",
        errors.ExitCode.IO: "the storage refused: I/O error, permission, missing directory, full",
        errors.ExitCode.DAMAGE: "bytes do not match their checksum or their name; also of a command that looks for it",
        errors.ExitCode.BUSY: "somebody else holds what was asked for",
        errors.ExitCode.BUG: "a bug in Rewarm: please report it",
    }
    lines = [
        "# Exit codes",
        MADE,
        "",
        "Every `rewarm` command ends with one of these. They and the JSON of `--json` are promises: a script may rely",
        "on them. Data goes to stdout, all else to stderr: `error: ...` in one line and, mostly, `hint: ...`.",
        "",
        "| code | meaning | raised as |",
        "|---|---|---|",
    ]
    for code in errors.ExitCode:
        raised = ", ".join(f"`{cls.__name__}`" for cls in _error_classes(errors.RewarmError) if cls.exit_code is code)
        lines.append(f"| {int(code)} | {meanings[code]} | {raised if code is not errors.ExitCode.BUG else '-'} |")
    lines += ["| 128 + N | ended by signal N: 130 after Ctrl-C, 141 when the reader of our output went away | - |", ""]
    return "\n".join(lines)


def _error_classes(root: type[errors.RewarmError]) -> list[type[errors.RewarmError]]:
    found = [root]
    for sub in (sub for sub in root.__subclasses__() if sub.__module__ == errors.__name__):
        found += _error_classes(sub)
    return found


if __name__ == "__main__":
    sys.exit(main())

"""The documentation is true: its code runs, its commands exist, its links lead somewhere.

README and `docs/*.md` are read block by block. Every fenced block must be of a kind that is checked here; one that is
not fails the test. A page's blocks run in order, in a folder of its own in which the placeholders are real: `TARGET`
and `path/to/target` are a tiny target, `DRAFT` and `path/to/dspark-draft` a draft for it; there are prompts, too.

- `python`, and `diff` as it is after the change: run, with `model`, `draft`, `tokenizer` and `inputs` defined.
- `bash`: `dspark-hf` runs, with `SHORTER` added to its arguments; what is in `PARSED_ONLY` goes through the real
  parser, with the reason; `make` and `pip install` must name targets, variables and extras that exist.
- `console`: commands behind `$ ` with their exact output.
- `args`: a recipe, read by the real parser; `json`, `jsonl`, `bibtex`: read, and compared with what they show.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import pytest
from bigram_pair import write_pair
from packagings import base_draft, dflash_draft
from running import use_cost_table
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDraftModel
from dspark_hf.checkpoints import (
    CHECKED,
    detect_reader,
    open_checkpoint,
    verdicts,
    write_serving,
    write_speculators,
)
from dspark_hf.cli import build_parser, main
from dspark_hf.training.prepare import read_prompts, tokenize_prompts

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "space" / "README.md"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

# What makes a command fit for a tiny pair: later arguments override earlier ones.
SHORTER = {
    "prepare": ["--max-new-tokens", "12"],
    "train": ["--anchors", "8", "--batch-size", "2", "--max-steps", "2", "--save-every", "2", "--log-every", "1"],
    "calibrate": ["--max-new-tokens", "24"],
    "profile": ["--rows", "1", "--seconds", "0.5"],
    "generate": ["--max-new-tokens", "8"],
    "bench": ["--limit", "1", "--max-new-tokens", "8", "--repeats", "1", "--rows", "1", "--no-baselines", "--no-bare"],
}
PARSED_ONLY = {
    "accelerate launch": "starts several processes, one per GPU",
}
# What a `make` target runs, for the flags in its ARGS.
RUN_BY_MAKE = {"bench": "benchmarks/run.py", "demo": "src/dspark_hf/cli/demo.py", "space": "space/app.py"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line} ({self.kind or 'no language'})"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks, in order."""
    blocks, opened = [], None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"\s*```(.*)", line)
        if not fence:
            if opened:
                opened[2].append(line)
        elif opened is None:
            opened = (number, fence[1].strip(), [])
        else:
            start, kind, lines = opened
            blocks.append(Block(page, start, kind, textwrap.dedent("\n".join(lines)) + "\n"))
            opened = None
    assert opened is None, f"{page.name}: the block from line {opened and opened[0]} on is not closed"
    return blocks


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```[^\n]*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


# Places ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def place(pair, tmp_path, monkeypatch) -> Path:
    """A folder in which the placeholders of the pages are there; the current directory."""
    target, draft = pair
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name, folder in (("TARGET", target), ("DRAFT", draft)):
        (tmp_path / name).symlink_to(folder)
    (tmp_path / "path" / "to" / "target").symlink_to(target)
    (tmp_path / "path" / "to" / "dspark-draft").symlink_to(draft)
    for name in ("prompts", "held-out"):
        rows = [{"prompt": f"{name} {number}", "source": ("gsm8k", "mbpp")[number % 2]} for number in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Running --------------------------------------------------------------------------------------------------------------


class Page:
    """Runs the blocks of one page, in the current directory."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.parsed_only: list[str] = []
        self._names: dict | None = None

    def run(self, block: Block) -> None:
        """Checks a block as its kind asks for; fails for kinds that nothing here checks."""
        check = getattr(self, f"_{block.kind}", None)
        assert block.kind and check, f"{block}: no test knows how to check such a block"
        check(block)

    @property
    def names(self) -> dict:
        """What Python blocks find defined; one namespace for the whole page."""
        if self._names is None:
            model = AutoModelForCausalLM.from_pretrained("TARGET")
            tokenizer = AutoTokenizer.from_pretrained("TARGET", padding_side="left")
            self._names = {
                "AutoModelForCausalLM": AutoModelForCausalLM,
                "model": model,
                "draft": DSparkDraftModel.from_pretrained("DRAFT"),
                "tokenizer": tokenizer,
                "inputs": tokenizer(["a prompt", "another one"], padding=True, return_tensors="pt"),
            }
            self._names["inputs"].pop("token_type_ids", None)
        return self._names

    def _python(self, block: Block) -> None:
        with self.monkeypatch.context() as patch:
            use_cost_table(patch)
            exec(compile(block.text, str(block), "exec"), self.names)

    def _diff(self, block: Block) -> None:
        lines = [line for line in block.text.splitlines() if not line.startswith("-")]
        assert len(lines) < len(block.text.splitlines()), f"{block}: nothing is taken away"
        self._python(Block(block.page, block.line, "python", "\n".join(line[2:] for line in lines)))
        assert self.names["out"].shape[1] > self.names["inputs"]["input_ids"].shape[1]

    def _bash(self, block: Block) -> None:
        for words in commands(block.text):
            self.command(words, str(block))

    def command(self, words: list[str], where: str) -> str:
        """Runs or checks one command line; returns what it printed."""
        line = shlex.join(words)
        for prefix in PARSED_ONLY:
            if line.startswith(prefix):
                self.parsed_only.append(prefix)
                parse(words, where)
                return ""
        if words[0] == "make":
            check_make(words, where)
        elif words[:2] == ["pip", "install"]:
            check_pip(words, where)
        elif words[0] == "dspark-hf":
            parse(words, where)
            return self._dspark_hf(words[1:], where)
        else:
            raise AssertionError(f"{where}: no test knows how to check `{line}`")
        return ""

    def _dspark_hf(self, argv: list[str], where: str) -> str:
        extra = list(SHORTER.get(argv[0], []))
        if "--resume" in argv:
            extra += ["--max-steps", "3"]
        status = main([*argv, *extra])
        printed = self.capsys.readouterr()
        assert status == 0, f"{where}: `dspark-hf {shlex.join(argv)}` ended with {status}: {printed.err[-600:]}"
        return printed.out

    def _console(self, block: Block) -> None:
        expected: list[tuple[str, list[str]]] = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                expected.append((line[2:], []))
            else:
                assert expected, f"{block}: starts with output"
                expected[-1][1].append(line)
        for line, output in expected:
            assert self.command(shlex.split(line), str(block)).splitlines() == output, f"{block}: {line}"

    def _args(self, block: Block) -> None:
        name = re.match(r"# (\S+\.args)", block.text)
        assert name, f"{block}: begins with a comment that names the file"
        Path(name[1]).write_text(block.text)
        needed = ["--model", "TARGET", "--data", "responses.jsonl", "--output", "somewhere"]
        build_parser().parse_args(["train", f"@{name[1]}", *needed])

    def _json(self, block: Block) -> None:
        """A line of the training log has exactly the keys of the run that the page has just made."""
        logged = json.loads(Path("my-draft/training.json").read_text())["last_log"]
        assert set(json.loads(block.text)) == set(logged) - {"step"}, block

    def _jsonl(self, block: Block) -> None:
        Path("rows.jsonl").write_text(block.text)
        prompts = tokenize_prompts(read_prompts("rows.jsonl"), self.names["tokenizer"])
        assert len(prompts) == len(block.text.splitlines()) and all(prompt.ids for prompt in prompts)

    def _bibtex(self, block: Block) -> None:
        assert block.text.startswith("@") and block.text.count("{") == block.text.count("}")
        number = re.search(r"eprint\s*=\s*\{([\d.]+)\}", block.text)[1]
        assert f"https://arxiv.org/abs/{number}" in block.page.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The command lines of a script, comments dropped and continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def parse(words: list[str], where: str) -> None:
    """Gives a command line to the parser of `dspark-hf`."""
    if words[0] == "accelerate":
        assert words[words.index("-m") + 1] == "dspark_hf.cli", where
        words = words[words.index("-m") + 1 :]
    try:
        build_parser().parse_args(words[1:])
    except SystemExit:
        raise AssertionError(f"{where}: dspark-hf does not understand `{shlex.join(words)}`") from None


def check_make(words: list[str], where: str) -> None:
    """Targets and variables are in the Makefile; flags in ARGS are known to what the target runs."""
    targets = [word for word in words[1:] if "=" not in word]
    assert targets, where
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"{where}: no target {target!r}"
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if sign:
            assert re.search(rf"^{name}\s*\?=", MAKEFILE, re.MULTILINE), f"{where}: no variable {name!r}"
        if name == "ARGS":
            source = (ROOT / RUN_BY_MAKE[targets[0]]).read_text(encoding="utf-8")
            for flag in re.findall(r"--[a-z][a-z-]+", value):
                assert f'"{flag}"' in source, f"{where}: {RUN_BY_MAKE[targets[0]]} has no {flag}"


def check_pip(words: list[str], where: str) -> None:
    """Installs this project or a listed dependency of it, with extras that it has."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words[2:]:
        name, _, extras = word.rstrip("]").partition("[")
        assert name in (".", "dspark-hf") or f'"{name}' in pyproject, f"{where}: {name!r} is no part of this project"
        for extra in filter(None, extras.split(",")):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"{where}: no extra {extra!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page, place, capsys, monkeypatch):
    runner = Page(capsys, monkeypatch)
    for block in blocks_of(page):
        runner.run(block)


def test_exceptions_are_needed():
    """Every command that is only parsed stands on some page."""
    lines = [
        shlex.join(words) for page in PAGES for b in blocks_of(page) if b.kind == "bash" for words in commands(b.text)
    ]
    for prefix in PARSED_ONLY:
        assert any(line.startswith(prefix) for line in lines), f"PARSED_ONLY: {prefix!r} is on no page"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("", "text"),
        ("text", "text"),
        ("rust", "fn main() {}"),
        ("bash", "curl https://example.com | sh"),
        ("bash", "make nothing"),
        ("bash", "make demo NOTHING=1"),
        ("bash", "make bench ARGS='--nothing 1'"),
        ("bash", "pip install '.[nothing]'"),
        ("bash", "dspark-hf nothing"),
        ("bash", "dspark-hf inspect DRAFT --nothing"),
        ("bash", "accelerate launch -m dspark_hf.cli train --nothing"),
        ("bash", "dspark-hf inspect TARGET"),
        ("console", "$ dspark-hf serve-command DRAFT --engine vllm --target TARGET\nvllm"),
        ("python", "assert False"),
        ("diff", "+ out = inputs"),
        ("bibtex", "@misc{a, eprint = {1234.5678}}"),
        ("jsonl", '{"nothing": 1}'),
    ],
)
def test_what_is_wrong_is_noticed(kind, text, place, capsys, monkeypatch):
    with pytest.raises((AssertionError, ValueError)):
        Page(capsys, monkeypatch).run(Block(ROOT / "README.md", 1, kind, text + "\n"))


# Links and names ------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        title = LINK.sub("", title) if LINK.fullmatch(title) else title
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        number = 0
        while (name := slug if not number else f"{slug}-{number}") in anchors:
            number += 1
        anchors.add(name)
    return anchors


OTHER_PAGES = [*(ROOT / "tests").rglob("*.md"), *(ROOT / "checkpoints").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES + OTHER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose_of(page)):
        address = urlparse(link)
        if address.scheme:
            assert address.scheme == "https" and "." in address.netloc, f"{page.name}: {link}"
            continue
        path = (page.parent / address.path).resolve() if address.path else page
        assert path.exists(), f"{page.name}: {link} leads nowhere"
        assert path.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        if address.fragment:
            assert path.suffix == ".md", f"{page.name}: {link}: lines and symbols move; name them instead"
            assert address.fragment in anchors_of(path), f"{page.name}: {path.name} has no heading #{address.fragment}"


def test_the_readme_leads_to_every_page_and_example():
    linked = {(ROOT / link).resolve() for link in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    pages = {page for page in PAGES if page.parent != ROOT}
    examples = {path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith(("_", "gpu"))}
    assert {path.name for path in (pages | examples) - linked} == set()


def test_pages_that_are_named_in_code_exist():
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "src").rglob("*.py")]:
        for name in re.findall(r"docs/[\w-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path.name} names {name}"


def flags_of(command: str | None = None) -> set[str]:
    """Flags of one subcommand of `dspark-hf`, or of all."""
    (subcommands,) = [action for action in build_parser()._actions if hasattr(action, "choices") and action.choices]
    parsers = subcommands.choices.values() if command is None else [subcommands.choices[command]]
    return {flag for parser in parsers for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    everywhere = flags_of()
    for code in re.findall(r"`([^`\n]+)`", prose_of(page)):
        words = code.split()
        if words[0] == "dspark-hf" and len(words) > 1:
            assert set(re.findall(r"--[a-z-]+", code)) <= flags_of(words[1]), f"{page.name}: `{code}`"
        elif words[0].startswith("--"):
            assert re.match(r"--[a-z0-9-]+", words[0])[0] in everywhere, f"{page.name}: `{code}`"
        elif words[0] == "make":
            check_make(words if len(words) > 1 else ["make", "nothing"], f"{page.name}: `{code}`")


# The pages' own claims ------------------------------------------------------------------------------------------------

METHOD = ROOT / "docs" / "method.md"


def equations_in(text: str) -> set[int]:
    """Numbers of the equations that a text names: "eq. 4, 5", "eq. 2 and 3", "eq. 9 to 12"."""
    found: set[int] = set()
    for numbers in re.findall(r"\beq\. (\d+(?:(?:, | and | to )\d+)*)", text):
        values = [int(number) for number in re.findall(r"\d+", numbers)]
        found |= set(range(values[0], values[1] + 1)) if " to " in numbers else set(values)
    return found


def test_equation_index_is_complete():
    text = METHOD.read_text(encoding="utf-8")
    named = set().union(*(equations_in(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")))
    assert named >= set(range(2, 13))  # the expression above finds them
    assert equations_in(text) >= named
    assert all(words in text for words in ("Algorithm 1", "appendix A", "STS", "figure 2"))


def test_equation_index_names_what_is_there():
    entries = re.findall(r"\[`([\w.]+)`\]\(([^)]+)\)", METHOD.read_text(encoding="utf-8"))
    assert len(entries) > 40
    for name, link in entries:
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(["dspark_hf", *parts[:cut]]))
                break
            except ModuleNotFoundError:
                continue
        else:
            raise AssertionError(f"{name}: no such module")
        for part in parts[cut:]:
            assert hasattr(found, part), f"{name} is not there"
            found = getattr(found, part)
        source = Path(inspect.getsourcefile(inspect.unwrap(found)))
        assert source == (METHOD.parent / link).resolve(), f"{name} is in {source.name}"


def test_serving_page_says_what_the_engines_would():
    """Its table against the rules, with a draft of each kind, written as the last column says."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    for name, version in CHECKED.items():
        assert re.search(rf"{name} {re.escape(version)}", text, re.IGNORECASE), f"{name} {version}"
    borrowed = {"stores_embedding": False, "stores_head": False}
    kinds = {
        "Qwen 3 style layers": base_draft(**borrowed),
        "the same, reduced": base_draft(draft_vocab_size=20, stores_embedding=False),
        "Llama style": base_draft(qk_norm=False, **borrowed),
        "gated or rnn": base_draft(markov_head_type="gated", **borrowed),
        "no Markov head": dflash_draft(**borrowed),
        "taps after": base_draft(target_layer_ids=[0, 2, 5], **borrowed),
    }
    for start, draft in kinds.items():
        row = re.search(rf"^\| {start}.*\|$", text, re.MULTILINE)
        assert row, f"no row begins with {start!r}"
        _, vllm, sglang, packaging = (cell.strip() for cell in row[0].strip("|").split("|"))
        said = {"vllm": vllm.startswith("yes"), "sglang": sglang.startswith("yes")}
        assert served(draft, packagings=re.findall(r"`(\w+)`", packaging)) == said, start


def served(draft: DSparkDraftModel, packagings: list[str]) -> dict[str, bool]:
    """By engine, whether it would serve a draft in any packaging that holds it; those named must hold it."""
    result = {"vllm": False, "sglang": False}
    for name, write in {"serving": write_serving, "speculators": write_speculators}.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                write(draft, Path(folder) / "out")
            except ValueError:
                assert name not in packagings, f"{name} refuses what the page says it holds"
                continue
            files = open_checkpoint(Path(folder) / "out")
            reader = detect_reader(files)
            config = reader.read_config(files.config, files.tensors, None)
            for engine, verdict in verdicts(files, reader, config).items():
                result[engine] |= verdict.serves
    return result


def test_recipes_are_understood():
    """Recipe files of the repository, by the command that reads them."""
    for path in (ROOT / "examples").glob("*.args"):
        needed = ["--model", "TARGET", "--data", "responses.jsonl", "--output", "somewhere"]
        build_parser().parse_args(["train", f"@{path}", *needed])


def test_docs_check_is_part_of_the_tests():
    """It runs files that `make test` runs as well, those that hold the pages to what they are made from among them."""
    recipe = re.search(r"^docs-check:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    files = re.findall(r"tests/(\w+)\.py", recipe)
    assert {"test_docs", "test_examples", "test_report", "test_published"} <= set(files)
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in files)

"""The pages with measured figures say what the stored runs say, and nothing is left of runs that are gone."""

import json
import sys
from pathlib import Path

import pytest
from golden_set import golden

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import _svg  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import scaling  # noqa: E402

from dspark_hf.benchmarking.prompts import group_by_domain  # noqa: E402
from dspark_hf.cli import main  # noqa: E402


def test_readme_and_docs_are_not_stale():
    pages = report.render(report.load_reports(report.RESULTS), (ROOT / "README.md").read_text(encoding="utf-8"))
    assert report.stale_files(pages, ROOT) == [], "run `make report`"
    assert report.main(["--check"]) == 0


def test_every_stored_run_is_shown_and_small():
    paths = sorted(report.RESULTS.glob("*.json"))
    assert paths
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    assert [path.name for path in paths if f"`{path.name}`" not in page] == []
    assert sum(path.stat().st_size for path in paths) < 1_000_000


def test_readme_part_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split(report.BEGIN)[1].split(report.END)[0]
    assert len(text.splitlines()) <= 30 and "docs/measured.md" in text


@pytest.fixture(scope="module")
def measured(tiny_pair, tmp_path_factory):
    """Everything that `make bench` does, with the tiny pair: a folder with README, docs and stored runs."""
    folder = tmp_path_factory.mktemp("bench")
    samples = golden("qwen3_rnn").runs["greedy_thr0.0"]["samples"]
    rows = [sample["output_ids"][: sample["num_input_tokens"]] for sample in samples]
    lines = [json.dumps({"source": s, "prompt_ids": ids}) for s in ("gsm8k", "poems") for ids in rows]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n")
    flags = ["--target", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), "--prompts", str(prompts), "--no-report"]
    flags += ["--results", str(folder / "results"), "--dtype", "float32", "--limit", "1", "--rows", "1", "2"]
    small = ["--hidden-size", "64", "--layers", "2", "--draft-layers", "1", "--rank", "8", "--context", "32", "64"]
    small += ["--rows", "1", "2", "--gamma", "3", "1", "--vocabulary", "128", "256", "--rounds", "3", "--repeats", "1"]
    with pytest.MonkeyPatch.context() as patch:
        original = scaling.main
        patch.setattr(scaling, "main", lambda argv: original([*argv, *small]))
        assert run.main([*flags, "--max-new-tokens", "12", "--draft-lengths", "3", "7"]) == 0
    (folder / "README.md").write_text(f"# A\n\nabove\n\n{report.BEGIN}\nold\n{report.END}\n\nbelow\n")
    assert report.main(["--results", str(folder / "results"), "--root", str(folder)]) == 0
    return folder


def test_pages_of_a_run(measured):
    readme = (measured / "README.md").read_text()
    assert readme.startswith(f"# A\n\nabove\n\n{report.BEGIN}\n") and readme.endswith(f"\n{report.END}\n\nbelow\n")
    assert "old" not in readme.split("above")[1]
    stored = json.loads((measured / "results" / "bench.json").read_text())
    table = [line for line in readme.splitlines() if line.startswith("|")]
    for result in stored["results"]:
        if result["domain"] == "all" and result["method"] != "plain":
            if result["rows"] == 1 or result["schedule"]:
                (line,) = [x for x in table if x.startswith(f"| {result['rows']} ") and f"{result['method']} " in x]
                assert f"{result['speedup']:.2f}" in line
    assert len(readme.split(report.BEGIN)[1].split(report.END)[0].splitlines()) <= 30
    page = (measured / "docs" / "measured.md").read_text()
    for words in (
        "### Acceptance",
        "### The physical limit",
        "### Exactness",
        "### Left out",
        "## Scaling",
        "free draft",
    ):
        assert words in page
    for image in ("bench-speed", "bench-acceptance", "scaling-context"):
        assert f"(measured/{image}.svg)" in page
        assert (measured / "docs" / "measured" / f"{image}.svg").read_text().startswith("<svg")


def test_what_the_drafts_were_trained_on_is_said(measured):
    from _side_by_side import describe_run

    stored = json.loads((measured / "results" / "bench.json").read_text())
    assert stored["draft_training"] is None and "trained on" not in describe_run(stored)
    stored |= {"draft_training": {"blocks": 576000}, "dflash_training": {"blocks": 1200}}
    assert "tokens, trained on 576,000 blocks (the rank-0 draft on 1,200). Measured on" in describe_run(stored)


def test_check_notices_changed_figures_and_leftovers(measured, tmp_path, capsys):
    for path in measured.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(measured)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    places = ["--results", str(tmp_path / "results"), "--root", str(tmp_path)]
    assert report.main([*places, "--check"]) == 0
    stored = tmp_path / "results" / "bench.json"
    run_of_it = json.loads(stored.read_text())
    for result in run_of_it["results"]:
        result["speedup"] += 0.5
    stored.write_text(json.dumps(run_of_it))
    assert report.main([*places, "--check"]) == 1
    assert "README.md does not say" in capsys.readouterr().err
    stored.unlink()
    assert report.main(places) == 0 and report.main([*places, "--check"]) == 0
    assert not (tmp_path / "docs" / "measured" / "bench-speed.svg").exists()
    (tmp_path / "README.md").write_text("no place\n")
    with pytest.raises(ValueError, match="no place for the figures"):
        report.main(places)


def test_runs_of_every_kind_have_a_section(tiny_pair, measured, tmp_path):
    import acceptance
    import generate
    import gpu
    import load
    import teacher_forced
    import thresholds

    pair = ["--target", str(tiny_pair[0]), "--draft", str(tiny_pair[1]), "--device", "cpu"]
    pair += ["--prompts", str(measured / "prompts.jsonl"), "--max-new-tokens", "8"]
    small = ["--domains", "all", "--dtype", "float32"]
    results = tmp_path / "results"
    generate.main([*pair, "--dtypes", "float32", "--rows", "1", "--repeats", "1", "--output", str(results / "a.json")])
    flags = ["--rows", "1", "--useless-tokens", "8", "--useless-repeats", "1", "--table-seconds", "0.3"]
    load.main([*pair, *small, *flags, "--output", str(results / "b.json")])
    flags = ["--rows", "2", "--thresholds", "0", "0.5"]
    thresholds.main([*pair, *small, *flags, "--output", str(results / "c.json")])
    acceptance.main([*pair, "--dtype", "float32", "--rows", "2", "--output", str(results / "e.json")])
    flags = ["--target", str(tiny_pair[0]), "--drafts", str(tiny_pair[1]), "--dtype", "float32", "--anchors", "2"]
    rows = [json.loads(line) for line in (measured / "prompts.jsonl").read_text().splitlines()]
    responses = tmp_path / "responses.jsonl"
    responses.write_text("".join(json.dumps(row | {"response_ids": [5, 6, 7, 8, 9]}) + "\n" for row in rows))
    teacher_forced.main([*flags, "--data", str(responses), "--output", str(results / "f.json")])
    flags = ["--shapes", "tiny", "--device", "cpu", "--context", "8", "--new-tokens", "8", "--samples", "1"]
    gpu.main([*flags, "--rows", "1", "--sections", "rounds", "--output", str(results / "d.json")])
    flags = ["--no-save", "--report", str(results), "--dtype", "float32", "--max-new-tokens", "24"]
    assert main(["calibrate", *map(str, tiny_pair[:2]), "--prompts", str(measured / "prompts.jsonl"), *flags]) == 0
    charts = {}
    for name, stored in report.load_reports(results).items():
        parts = report.SECTIONS[report.kind_of(stored)](name, stored, charts)
        assert f"`{name}.json`" in parts[0] and any(part.startswith("| ") for part in parts), name
    assert set(report.load_reports(results)) == {"a", "b", "c", "d", "e", "f", "calibration"}
    wanted = {"e.svg", "f.svg", "b-verified.svg", "c-acceptance_rate.svg", "c-tokens_per_step.svg", "calibration.svg"}
    assert wanted <= set(charts) and all(chart.startswith("<svg") for chart in charts.values())


def test_scaling_moves_one_axis_at_a_time(measured):
    stored = json.loads((measured / "results" / "scaling.json").read_text())
    base, *others = stored["results"]
    assert set(base["axes"]) == set(scaling.AXES) and len(others) == 4
    for result in others:
        (axis,) = result["axes"]
        assert [name for name in scaling.AXES if result[name] != base[name]] == [axis]
    for result in stored["results"]:
        assert 0 < result["head_percent"] < 100 and result["overhead"] > 0 and result["break_even"] > 0
        assert result["head_seconds"] < result["round_seconds"]


def test_run_without_a_draft_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "DRAFT", ROOT / "checkpoints" / "no-such-draft")
    assert run.main(["--results", str(tmp_path)]) == 1
    assert "there is no draft in checkpoints/no-such-draft: name one with --draft" in capsys.readouterr().err


def test_prompts_of_the_project():
    rows = [json.loads(line) for line in run.PROMPTS.read_text(encoding="utf-8").splitlines()]
    by_source: dict[str, list] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row["prompt"])
    counts = {domain: len(prompts) for domain, prompts in group_by_domain(by_source).items()}
    assert counts == dict.fromkeys(("math", "code", "chat"), 8) and run.LIMIT <= 8


def test_charts_keep_inside_their_frame():
    import re

    chart = _svg.bars("A & B", ["x", "y"], {"one": [0.5, 12.0], "two": [None, 3.0]}, line=1.0)
    assert chart.count("<rect") == 3 + 2 and "A &amp; B" in chart
    heights = [float(height) for height in re.findall(r'width="[\d.]+" height="([\d.]+)" fill', chart)]
    assert max(heights) < _svg.HEIGHT and min(heights) > 0
    chart = _svg.lines("t", {"a": [(1, 0.2), (4096, 0.9)]}, "context", top=1.0)
    assert chart.count("<circle") == 2 and ">4096<" in chart
    assert chart == _svg.lines("t", {"a": [(1, 0.2), (4096, 0.9)]}, "context", top=1.0)

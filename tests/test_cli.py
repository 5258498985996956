"""The command line: what it prints, and how it refuses."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from planted import random_draft
from targets import build

from dspark_hf import DSparkDraftModel, GenerationStats
from dspark_hf.cli import main
from dspark_hf.demo import compare
from dspark_hf.demo.compare import first_difference

IDS = "146,38,154,86,151,109,20,64,19,150,42,82"


@pytest.fixture(scope="module")
def tiny(tiny_pair):
    """Arguments naming the tiny pair, which has no tokenizer."""
    target, draft = tiny_pair
    return ["--model", str(target), "--draft", str(draft)]


@pytest.fixture(scope="module")
def textual(tmp_path_factory):
    """Arguments naming a tiny target with a byte-level tokenizer, and a random draft for it."""
    folder = tmp_path_factory.mktemp("textual")
    target = build("qwen3")
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    random_draft(target).save_pretrained(folder / "draft")
    return ["--model", str(folder / "target"), "--draft", str(folder / "draft")]


def run(capsys, *argv):
    """Exit status, stdout and stderr of `dspark-hf argv...`."""
    status = main(list(argv))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "generate" in text and "demo" in text


def test_generate_prints_the_token_ids_of_plain_generation(capsys, tiny, tiny_pair):
    from transformers import AutoModelForCausalLM

    status, out, err = run(capsys, "generate", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "24", "--stats")
    assert status == 0
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    prompt = torch.tensor([[int(token) for token in IDS.split(",")]])
    plain = target.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24)
    assert out.split() == [str(token) for token in plain[0, prompt.shape[1] :].tolist()]
    assert "tau" in err and "accepted" in err


def test_generate_answers_several_prompts_as_one_batch(capsys, textual, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a rather longer prompt\n\nshort\n")
    status, out, _ = run(capsys, "generate", *textual, "hello", "--prompt-file", str(file), "--max-new-tokens", "5")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == ["--- 1", "--- 2", "--- 3"]


def test_generate_streams_one_answer(capsys, textual):
    status, streamed, _ = run(capsys, "generate", *textual, "hello", "--max-new-tokens", "12")
    assert status == 0 and streamed.strip()
    again = run(capsys, "generate", *textual, "hello", "--max-new-tokens", "12", "--num-draft-tokens", "2")[1]
    assert again == streamed


def test_sampling_depends_on_the_seed_alone(capsys, tiny):
    flags = ("generate", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "24", "--temperature", "2")
    first, same, other = (run(capsys, *flags, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == same != other


def test_demo_compares_with_plain_generation(capsys, tiny):
    status, out, _ = run(capsys, "demo", *tiny, "--prompt-ids", IDS, "--max-new-tokens", "32", "--repeats", "1")
    assert status == 0
    assert "plain generate(): 32 tokens" in out and "DSpark: 32 tokens" in out
    assert "tau" in out and "outputs identical" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "PAIR"], "--prompt-ids"),
        (["generate", "PAIR", "a prompt"], "no tokenizer"),
        (["generate", "PAIR", "--prompt-ids", "5,x"], "'5,x'"),
        (["generate", "PAIR", "--prompt-ids", "5,192"], "0 to 191"),
        (["generate", "PAIR", "--prompt-ids", "5", "--prompt-file", "no-such-file"], "no-such-file"),
        (["generate", "PAIR", "--prompt-ids", "5", "--confidence-threshold", "2"], "assistant_confidence_threshold"),
        (["demo", "PAIR", "--prompt-ids", "5", "--repeats", "0"], "repeats"),
        (["demo", "--model", "TARGET", "--draft", "TARGET", "--prompt-ids", "5"], "packaging"),
    ],
)
def test_refusals_take_one_line_and_no_traceback(capsys, tiny, tiny_pair, argv, words):
    argv = [str(tiny_pair[0]) if word == "TARGET" else word for word in argv]
    place = argv.index("PAIR") if "PAIR" in argv else None
    if place is not None:
        argv[place : place + 1] = tiny
    status, _, err = run(capsys, *argv)
    assert status == 1
    message = err[err.index(f"dspark-hf {argv[0]}: ") :]
    assert words in message and "Traceback" not in err


def test_first_difference_asks_the_target(tiny_pair):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    prompt = torch.tensor([[int(token) for token in IDS.split(",")]])
    answer = target.generate(input_ids=prompt, max_new_tokens=6)[0, prompt.shape[1] :].tolist()
    assert first_difference(target, prompt, answer, answer) is None
    changed = [*answer[:4], (answer[4] + 1) % 190, answer[5]]
    difference = first_difference(target, prompt, answer, changed)
    assert (difference.index, difference.plain, difference.dspark) == (4, answer[4], changed[4])
    assert difference.logit_gap > 0
    shorter = first_difference(target, prompt, answer, answer[:3])
    assert (shorter.index, shorter.plain, shorter.dspark) == (3, answer[3], -1)


def test_compare_takes_one_prompt(tiny_pair):
    from transformers import AutoModelForCausalLM

    target, draft = AutoModelForCausalLM.from_pretrained(tiny_pair[0]), DSparkDraftModel.from_pretrained(tiny_pair[1])
    with pytest.raises(ValueError, match="one prompt"):
        compare(target, draft, {"input_ids": torch.ones(2, 3, dtype=torch.long)}, max_new_tokens=4)
    prompt = torch.tensor([[5, 6, 7]])
    comparison = compare(target, draft, {"input_ids": prompt}, repeats=1, max_new_tokens=12)
    assert comparison.plain_ids == comparison.dspark_ids and comparison.difference is None
    assert isinstance(comparison.stats, GenerationStats) and comparison.stats.rounds > 0
    assert comparison.plain_speed > 0 and comparison.dspark_speed > 0


@pytest.mark.smollm2
@pytest.mark.slow
def test_demo_on_smollm2(capsys, smollm2_path, scout_folder):
    flags = ("--draft", str(scout_folder), "--dtype", "float32", "--max-new-tokens", "48", "--repeats", "1")
    status, out, _ = run(capsys, "demo", *flags)
    assert status == 0
    assert "outputs identical" in out


@pytest.mark.smollm2
def test_smollm2_chat_template_gives_the_prompts_of_the_data(smollm2_path, eval_rows):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    for row in eval_rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert encoded["input_ids"] == row["prompt_ids"]

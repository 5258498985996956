"""Training from end to end on tiny targets: it learns, resumes, survives a full disk; its drafts generate exactly."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import targets
import torch
from byte_tokenizer import byte_tokenizer
from transformers import TrainerCallback

from dspark_hf import DSparkDraftModel, record_generation
from dspark_hf.benchmarking.machine import training_record
from dspark_hf.checkpoints import load_checkpoint_config, write_deepspec
from dspark_hf.cli import main
from dspark_hf.training import (
    DraftOptions,
    DSparkTrainer,
    DSparkTrainingArguments,
    ResponseRows,
    TimeLimit,
    export_draft,
    new_draft,
)
from dspark_hf.training.checkpointing import check, checkpoint_to_resume, damage, list_checkpoints, rotate

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files as Linux does")
NEW_TOKENS = 40


def prompts_and_responses(target):
    prompts = targets.clear_prompts(target, (5, 7, 6, 9, 4, 8), NEW_TOKENS, seed=3)
    return prompts, targets.plain_greedy(target, prompts, NEW_TOKENS)


def write_data(path, target):
    rows = zip(*prompts_and_responses(target))
    path.write_text("".join(json.dumps({"prompt_ids": p, "response_ids": r}) + "\n" for p, r in rows))
    return path


def make_trainer(folder, target, *, packing=False, draft_options=None, callbacks=None, **arguments):
    """A small trainer whose data, draft and seeds depend on its arguments only."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    data = write_data(folder / "data.jsonl", target)
    torch.manual_seed(0)
    options = dict(num_layers=2, mask_token_id=1, markov_rank=16, block_size=4) | (draft_options or {})
    draft, _ = new_draft(target, DraftOptions(**options))
    rows = ResponseRows([data], vocab_size=96, max_length=128, packing=packing)
    defaults = dict(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=6,
        learning_rate=3e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        num_anchors=24,
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
    )
    args = DSparkTrainingArguments(**(defaults | arguments))
    return DSparkTrainer(draft, target, args, rows, rows, callbacks=callbacks)


def losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def trained(request, tmp_path_factory):
    """A draft overfitted to six responses of a random target, the trainer that made it, and where it was exported."""
    folder, target = tmp_path_factory.mktemp(request.param), targets.build(request.param, "sdpa")
    trainer = make_trainer(folder, target, max_steps=200, save_strategy="steps", save_steps=100, save_total_limit=1)
    trainer.train()
    export_draft(trainer.draft, folder / "draft", dtype=torch.float32, target=target)
    return target, trainer, folder


# Learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loss_falls_and_acceptance_rises(trained):
    _, trainer, _ = trained
    curve = losses(trainer)
    assert curve[200] < 0.75 * curve[10]
    metrics = trainer.evaluate()
    assert metrics["eval_tau"] > 2.0
    logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    expected = {"tau", "ce", "l1", "confidence", "confidence_error", "confidence_bias", "grad_norm", "learning_rate"}
    assert expected | {f"accept@{slot}" for slot in range(4)} <= set(logged)
    assert {"eval_loss", "eval_accept@3", "eval_confidence"} <= set(metrics)


@pytest.mark.slow
@pytest.mark.exactness
def test_the_draft_loads_and_generates_exactly(trained):
    target, _, folder = trained
    draft = DSparkDraftModel.from_pretrained(folder / "draft")
    prompts, plain = prompts_and_responses(target)
    with record_generation() as stats:
        output = target.generate(
            **targets.left_pad(prompts), assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False
        )
    assert output[:, -NEW_TOKENS:].tolist() == plain
    assert stats.tau > 1.5
    (prompt,) = targets.prompts((6,), seed=99)  # one it has never seen
    output = target.generate(torch.tensor([prompt]), assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert output[0, 6:].tolist() == targets.plain(target, prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.slow
def test_every_checkpoint_is_a_draft(trained):
    target, trainer, folder = trained
    assert [path.name for path in list_checkpoints(folder / "run")] == ["checkpoint-200"]
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["checkpoint-200"]
    checkpoint = DSparkDraftModel.from_pretrained(folder / "run" / "checkpoint-200")
    for (name, tensor), (_, expected) in zip(checkpoint.state_dict().items(), trainer.draft.state_dict().items()):
        assert torch.equal(tensor, expected), name
    checkpoint.validate_target(target)


@pytest.mark.slow
def test_the_target_is_neither_trained_nor_saved(trained):
    target, trainer, folder = trained
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
    assert not any(name.startswith(("embed", "lm_head", "target")) for name in trainer.draft.state_dict())
    assert not any("target" in name for name, _ in trainer.model.named_parameters())


@pytest.mark.slow
def test_a_standalone_export_is_accepted_by_the_deepspec_writer(trained, tmp_path):
    """The layout that vLLM and SGLang serve; Gemma 3's scaled embedding is not part of it."""
    target, trainer, _ = trained
    if trainer.draft.config.backbone != "qwen3":
        pytest.skip("the layout has no place for this family's draft")
    export_draft(trainer.draft, tmp_path / "standalone", dtype=torch.float32, target=target, standalone=True)
    draft = DSparkDraftModel.from_pretrained(tmp_path / "standalone")
    write_deepspec(draft, tmp_path / "deepspec")
    config, reader = load_checkpoint_config(tmp_path / "deepspec")
    assert reader.name == "deepspec" and config.target_layer_ids == draft.config.target_layer_ids
    again = DSparkDraftModel.from_pretrained(tmp_path / "deepspec")
    prompts, plain = prompts_and_responses(target)
    output = target.generate(
        **targets.left_pad(prompts), assistant_model=again, max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert output[:, -NEW_TOKENS:].tolist() == plain
    assert not trainer.draft.config.stores_head  # the exported copy is another draft


def test_other_heads_packing_bf16_and_accumulation_train(tmp_path):
    target = targets.build("qwen3", "sdpa")
    variants = [
        dict(draft_options={"markov_head_type": "rnn", "draft_vocab_size": 60}, packing=True, bf16=True),
        dict(draft_options={"markov_head_type": "gated", "confidence": False}, gradient_accumulation_steps=3),
        dict(draft_options={"markov_rank": 0, "warm_start": False}, bf16=True),
    ]
    for number, variant in enumerate(variants):
        options = {"per_device_train_batch_size": 2, "max_steps": 20, "logging_steps": 2, **variant}
        if "draft_vocab_size" in options["draft_options"]:
            trainer = reduced_trainer(tmp_path / f"{number}", target, **options)
        else:
            trainer = make_trainer(tmp_path / f"{number}", target, **options)
        trainer.train()
        curve = losses(trainer)
        assert all(math.isfinite(loss) for loss in curve.values()) and curve[20] < curve[2], variant
        assert ("eval_confidence" in trainer.evaluate()) == (trainer.draft.confidence_head is not None)


def reduced_trainer(folder, target, **options):
    from dspark_hf.training import set_vocabulary

    trainer = make_trainer(folder, target, **options)
    # The step's own table of draft ids was made from the vocabulary, so a new trainer is made around it.
    set_vocabulary(trainer.draft, target, torch.arange(20, 80))
    args, rows = trainer.args, trainer.train_dataset
    return DSparkTrainer(trainer.draft, target, args, rows, rows)


def test_head_rows_of_a_reduced_vocabulary_are_left_to_the_target(tmp_path):
    target = targets.build("qwen3", "sdpa")
    options = {"max_steps": 2, "draft_options": {"draft_vocab_size": 60}}
    trainer = reduced_trainer(tmp_path / "run", target, **options)
    trainer.train()
    folders = [tmp_path / name for name in ("lean", "standalone", "own head")]
    for folder in folders[:2]:
        export_draft(trainer.draft, folder, dtype=torch.float32, target=target, standalone=folder.name != "lean")
    assert trainer.draft.config.stores_head and trainer.draft.lm_head is not None  # the exported copy is another draft
    trainer.draft.lm_head.weight.data[0] += 1.0
    export_draft(trainer.draft, folders[2], dtype=torch.float32, target=target)
    drafts = [DSparkDraftModel.from_pretrained(folder) for folder in folders]
    assert [draft.config.stores_head for draft in drafts] == [False, True, True]
    assert [draft.config.stores_embedding for draft in drafts] == [False, True, False]
    prompts, plain = prompts_and_responses(target)
    arguments = {**targets.left_pad(prompts), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    accepted = []
    for draft in drafts[:2]:
        draft.generation_config.num_assistant_tokens_schedule = "constant"  # nothing that is measured decides
        with record_generation() as stats:
            output = target.generate(**arguments, assistant_model=draft)
        assert output[:, -NEW_TOKENS:].tolist() == plain
        accepted.append(stats.accepted)
    assert accepted[0] == accepted[1]


def test_seed_decides_everything(tmp_path):
    target = targets.build("qwen3", "sdpa")
    curves = []
    for number, seed in enumerate((1, 1, 2)):
        trainer = make_trainer(tmp_path / f"{number}", target, max_steps=4, logging_steps=1, seed=seed)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0] == curves[1] != curves[2]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 2], ids=["nothing kept", "some rows kept", "all kept"])
def test_kept_features_change_nothing(tmp_path, monkeypatch, packing, limit):
    target = targets.build("qwen3", "sdpa")
    options = {"max_steps": 9, "logging_steps": 1, "per_device_train_batch_size": 2, "packing": packing}
    options["draft_options"] = {"draft_vocab_size": 60}
    wanted = reduced_trainer(tmp_path / "without", target, **options)
    wanted.train()
    row = (options["packing"] * 90 + 46) * (target.config.hidden_size * 3 + 1) * 4  # about a row's bytes
    trainer = reduced_trainer(tmp_path / "with", target, feature_cache_bytes=(1, 2 * row, 10**9)[limit], **options)
    forwards, forward = [], trainer.features.__class__.__call__
    monkeypatch.setattr(
        trainer.features.__class__, "__call__", lambda *args: (forwards.append(len(args[1])), forward(*args))[1]
    )
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(wanted), abs=2e-5)
    rows, seen = len(trainer.train_dataset), sum(forwards)
    assert trainer.cache.bytes <= trainer.args.feature_cache_bytes
    assert seen == rows if limit == 2 else seen > rows
    if limit == 1:
        assert trainer.cache.bytes > 0
    evaluated = [{**run.evaluate(), **run.evaluate()} for run in (trainer, wanted)]
    same = [key for key in evaluated[0] if key.startswith(("eval_accept", "eval_loss", "eval_confidence", "eval_tau"))]
    assert len(same) > 6
    assert [evaluated[0][key] for key in same] == pytest.approx([evaluated[1][key] for key in same], abs=2e-5)


def test_what_does_not_fit_is_refused(tmp_path):
    target = targets.build("qwen3", "sdpa")
    trainer = make_trainer(tmp_path, target, max_steps=1)
    with pytest.raises(ValueError, match="trained in float32"):
        DSparkTrainer(trainer.draft.bfloat16(), target, trainer.args, trainer.train_dataset)
    with pytest.raises(ValueError, match="num_target_layers"):
        DSparkTrainer(trainer.draft.float(), targets.build("qwen3", num_hidden_layers=3), trainer.args)
    with pytest.raises(ValueError, match="feature_cache_bytes"):
        make_trainer(tmp_path, target, feature_cache_bytes=-1)
    with pytest.raises(ValueError, match="without packing"):
        make_trainer(tmp_path, targets.build("mamba"), packing=True)


# Interruptions --------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import targets, test_training
from dspark_hf.training import checkpointing

def killed_while_sealing(folder, seal=checkpointing.seal):
    if folder.name == "checkpoint-8":
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder)

checkpointing.seal = killed_while_sealing
test_training.make_trainer(sys.argv[1], targets.build("qwen3", "sdpa"), **test_training.STEPS).train()
"""
STEPS = dict(max_steps=12, logging_steps=1, save_strategy="steps", save_steps=4, per_device_train_batch_size=4)


@pytest.mark.slow
def test_resume_after_a_kill_continues_the_same_curve(tmp_path):
    """Killed for real, in the middle of writing a checkpoint: the one before is used, and nothing changes."""
    target = targets.build("qwen3", "sdpa")
    straight = make_trainer(tmp_path / "straight", target, **STEPS)
    straight.train()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    run = tmp_path / "killed" / "run"
    assert sorted(path.name for path in run.iterdir()) == [".incomplete", "checkpoint-4"]
    resumed = make_trainer(tmp_path / "killed", target, **STEPS)
    resumed.train(resume_from_checkpoint=str(checkpoint_to_resume(run)))
    assert losses(resumed) == losses(straight)
    assert len(losses(resumed)) == 12
    for (name, tensor), (_, expected) in zip(resumed.draft.state_dict().items(), straight.draft.state_dict().items()):
        assert torch.equal(tensor, expected), name
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


class SmallDisk(TrainerCallback):
    """From a step on, no file can grow beyond a size."""

    def __init__(self, step, size):
        self.step, self.size = step, size

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@LINUX
@pytest.mark.parametrize("size", [100_000, 500_000], ids=["weights", "optimizer"])
def test_a_full_disk_loses_no_finished_checkpoint(tmp_path, size):
    target = targets.build("qwen3", "sdpa")
    trainer = make_trainer(tmp_path, target, **(STEPS | {"save_total_limit": 1}), callbacks=[SmallDisk(5, size)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"step 8 could not be written .* Checkpoint-4 is finished and untouched"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-4"]
    assert damage(tmp_path / "run" / "checkpoint-4") is None
    resumed = make_trainer(tmp_path, target, **(STEPS | {"save_total_limit": 1}))
    resumed.train(resume_from_checkpoint=str(checkpoint_to_resume(tmp_path / "run")))
    assert resumed.state.global_step == 12


@LINUX
def test_a_full_disk_at_the_export_is_an_os_error(tmp_path):
    target = targets.build("qwen3")
    draft, _ = new_draft(target, DraftOptions(num_layers=1, mask_token_id=1, markov_rank=4))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match="the draft could not be written"):
            export_draft(draft, tmp_path, dtype=torch.float32, target=target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_damaged_checkpoints_are_named(tmp_path):
    trainer = make_trainer(tmp_path, targets.build("qwen3", "sdpa"), **STEPS)
    trainer.train()
    run = tmp_path / "run"
    assert checkpoint_to_resume(run).name == "checkpoint-12"
    newest = run / "checkpoint-12"
    os.truncate(newest / "optimizer.pt", 1000)
    message = r"checkpoint-12 is damaged: optimizer.pt has 1000 bytes instead of \d+. Delete .* from checkpoint-8"
    with pytest.raises(ValueError, match=message):
        checkpoint_to_resume(run)
    with pytest.raises(ValueError, match="checkpoint-12 is damaged"):
        trainer.train(resume_from_checkpoint=str(newest))
    (run / "checkpoint-8" / "files.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-4, which is whole"):
        check(newest)
    weights = run / "checkpoint-4" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-10] ^= 1
    weights.write_bytes(contents)
    with pytest.raises(ValueError, match="other contents than were written. No other is whole"):
        check(run / "checkpoint-4")
    (newest / "scheduler.pt").unlink()
    assert damage(newest).startswith("optimizer.pt has")
    (run / "checkpoint-8" / "files.json").write_text("[")
    assert damage(run / "checkpoint-8") == "files.json is damaged"


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    for step in (5, 10, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-note").mkdir()
    rotate(tmp_path, None)
    assert len(list_checkpoints(tmp_path)) == 4
    rotate(tmp_path, 2, best=str(tmp_path / "checkpoint-5"))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-5", "checkpoint-20", "checkpoint-100"]


def test_best_checkpoint_is_remembered_under_its_final_name(tmp_path):
    trainer = make_trainer(
        tmp_path,
        targets.build("qwen3", "sdpa"),
        **(STEPS | {"save_total_limit": 1}),
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="tau",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-12")
    state = json.loads((tmp_path / "run" / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint


def test_time_limit_saves_and_stops(tmp_path):
    limit = TimeLimit(0.0)
    trainer = make_trainer(tmp_path, targets.build("qwen3", "sdpa"), **(STEPS | {"save_steps": 50}), callbacks=[limit])
    trainer.train()
    assert limit.reached and trainer.state.global_step == 1
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-1"]


# Several processes, command line --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe file for a tiny target with a tokenizer, on answers that `prepare` made."""
    folder = tmp_path_factory.mktemp("recipe")
    targets.build("qwen3").save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    prompts = [{"prompt": text, "source": "test"} for text in ("abc", "hello there", "what", "is it", "no", "or yes")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    arguments = ["--prompts", str(folder / "prompts.jsonl"), "--responses", "2", "--max-new-tokens", "24"]
    command = ["prepare", "--model", str(folder / "target"), *arguments, "--output", str(folder / "data.jsonl")]
    assert main(command) == 0
    (folder / "recipe.args").write_text(
        f"--model {folder / 'target'}  # the target\n"
        f"--data {folder / 'data.jsonl'} --eval-data {folder / 'data.jsonl'}\n"
        "--device cpu\n\n# the draft\n"
        "--layers 1 --taps 1,2 --block-size 3 --rank 8 --draft-vocab 64\n"
        "--max-steps 6 --anchors 8 --lr 2e-3 --log-every 1 --save-every 3 --keep 1\n"
    )
    return folder


def test_prepare_writes_text_and_ids(recipe, capsys):
    rows = [json.loads(line) for line in (recipe / "data.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    tokenizer = byte_tokenizer()
    for row in rows:
        assert row["prompt_ids"] == tokenizer(row["prompt"])["input_ids"]
        assert row["response"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
    command = ["prepare", "--model", str(recipe / "target"), "--prompts", str(recipe / "prompts.jsonl")]
    assert main([*command, "--output", str(recipe / "data.jsonl"), "--max-new-tokens", "24"]) == 1
    assert "other settings (responses)" in capsys.readouterr().err
    assert main([*command, "--output", str(recipe / "x.jsonl"), "--shard", "2/2"]) == 1
    assert "--shard" in capsys.readouterr().err


def test_train_command_in_pieces(recipe, tmp_path, capsys):
    command = ["train", f"@{recipe / 'recipe.args'}", "--output", str(tmp_path / "out"), "--batch-size", "4"]
    assert main([*command, "--time-limit", "0"]) == 0
    out = capsys.readouterr().out
    assert "Stopped by --time-limit after step 1" in out and "64 draft tokens hold" in out
    assert main(command) == 1
    assert "add --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--rank", "4"]) == 1
    assert "other --rank" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert "The draft is in" in capsys.readouterr().out
    draft = DSparkDraftModel.from_pretrained(tmp_path / "out")
    assert (draft.config.draft_vocab_size, draft.config.target_layer_ids) == (64, [1, 2])
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["steps"] == 6 and record["arguments"]["rank"] == 8 and "eval_tau" in record["evaluation"]
    target = targets.build("qwen3")
    output = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=20, do_sample=False)
    assert output[0, 3:].tolist() == targets.plain(target, [5, 6, 7], max_new_tokens=20, do_sample=False)


def test_train_command_goes_on_from_another_draft(recipe, tmp_path):
    # half precision without --device: Trainer wants to be told where there is no GPU
    common = ["--anchors", "8", "--max-steps", "2", "--precision", "bfloat16", "--data", str(recipe / "data.jsonl")]
    common += ["--model", str(recipe / "target")]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main(["train", *common, "--layers", "1", "--rank", "0", "--head", "none", "--output", first]) == 0
    assert main(["train", *common, "--draft", first, "--output", second, "--standalone"]) == 0
    draft = DSparkDraftModel.from_pretrained(second)
    assert training_record(second) == {"head": "none", "steps": 4, "blocks": 4 * 4 * 8, "epochs": pytest.approx(4 / 3)}
    assert draft.config.markov_rank == 0 and draft.config.stores_head and draft.config.stores_embedding


@pytest.mark.slow
def test_two_processes_train_as_one(recipe, tmp_path):
    """Half the rows each: the same losses, because denominators are summed and anchors belong to their rows."""
    common = ["-m", "dspark_hf.cli", "train", f"@{recipe / 'recipe.args'}", "--max-steps", "3", "--output"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    runs = {"one": [sys.executable, *common, str(tmp_path / "one"), "--batch-size", "4"]}
    runs["two"] = [*launch, *common, str(tmp_path / "two"), "--batch-size", "2"]
    logs = {}
    for name, command in runs.items():
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        state = json.loads((tmp_path / name / "checkpoint-3" / "trainer_state.json").read_text())
        logs[name] = [entry for entry in state["log_history"] if "loss" in entry]
    assert json.loads((tmp_path / "two" / "training.json").read_text())["processes"] == 2
    for one, two in zip(logs["one"], logs["two"], strict=True):
        for name in ("loss", "tau", "accept@0", "ce", "l1", "confidence", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-4), (one["step"], name)
    shutil.rmtree(tmp_path)

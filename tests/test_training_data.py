"""Before training: prompts and responses, rows, the reduced vocabulary, and a new draft's start."""

import copy
import json
import resource
import sys
import types

import pytest
import targets
import torch
from byte_tokenizer import byte_tokenizer

from dspark_hf.generation.capture import TapCapture, decoder_layers
from dspark_hf.training import (
    DraftOptions,
    ResponseRows,
    TargetFeatures,
    TargetHead,
    choose_mask_token,
    choose_vocabulary,
    coverage,
    default_taps,
    new_draft,
    set_vocabulary,
    soft_counts,
)
from dspark_hf.training.data import collate, pack, row_uniforms
from dspark_hf.training.features import embedding_factor
from dspark_hf.training.initialise import _source_layers
from dspark_hf.training.prepare import (
    Prompt,
    ResponseOptions,
    read_prompts,
    tokenize_prompts,
    write_responses,
)

CPU = torch.device("cpu")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# Prepare --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts():
    return [Prompt(ids, {"source": "test"}) for ids in targets.prompts((3, 9, 5, 12, 4, 7, 6, 8))]


def by_key(path):
    return {(row["prompt_number"], row["response_number"]): row for row in read_lines(path)}


def test_greedy_responses_are_plain_generation(tmp_path, prompts):
    target, output = targets.build("qwen3"), tmp_path / "new" / "out.jsonl"
    options = ResponseOptions(greedy=1.0, max_new_tokens=12)
    assert write_responses(target, prompts, output, options, batch_size=3, progress=False) == 8
    rows = by_key(output)
    for number, prompt in enumerate(prompts):
        row = rows[number, 0]
        assert row["response_ids"] == targets.plain(target, prompt.ids, max_new_tokens=12, do_sample=False)
        assert (row["prompt_ids"], row["mode"], row["source"]) == (prompt.ids, "greedy", "test")


def test_responses_end_with_their_stop_token(tmp_path, prompts, monkeypatch):
    target, output = targets.build("qwen3"), tmp_path / "out.jsonl"
    plain = targets.plain_greedy(target, [prompt.ids for prompt in prompts], 12)
    stop = plain[0][4]
    monkeypatch.setattr(target.generation_config, "eos_token_id", [stop, 95])
    write_responses(target, prompts, output, ResponseOptions(greedy=1.0, max_new_tokens=12), progress=False)
    for (number, _), row in by_key(output).items():
        expected = plain[number]
        ends = [place for place, token in enumerate(expected) if token in (stop, 95)]
        assert row["response_ids"] == (expected[: ends[0] + 1] if ends else expected)


def test_modes_are_mixed_and_sampling_is_seeded(tmp_path, prompts):
    target = targets.build("qwen3")
    options = ResponseOptions(responses=2, greedy=0.5, max_new_tokens=8, seed=5)
    for name in ("a", "b"):
        write_responses(target, prompts, tmp_path / name, options, batch_size=4, progress=False)
    first, second = by_key(tmp_path / "a"), by_key(tmp_path / "b")
    assert first == second and len(first) == 16
    for number in range(8):
        assert sorted(first[number, response]["mode"] for response in (0, 1)) == ["greedy", "sampled"]
    other = ResponseOptions(responses=2, greedy=0.5, max_new_tokens=8, seed=6)
    write_responses(target, prompts, tmp_path / "c", other, progress=False)
    assert by_key(tmp_path / "c") != first


def test_resume_skips_what_is_there_and_repairs_the_end(tmp_path, prompts):
    target, output = targets.build("qwen3"), tmp_path / "out.jsonl"
    options = ResponseOptions(greedy=1.0, max_new_tokens=6)
    write_responses(target, prompts, output, options, progress=False)
    complete = by_key(output)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:3]) + lines[3][:25])  # killed while writing the fourth
    assert write_responses(target, prompts, output, options, progress=False) == 5
    assert by_key(output) == complete
    assert write_responses(target, prompts, output, options, progress=False) == 0


def test_a_damaged_line_or_other_settings_are_refused(tmp_path, prompts):
    target, output = targets.build("qwen3"), tmp_path / "out.jsonl"
    options = ResponseOptions(greedy=1.0, max_new_tokens=6)
    write_responses(target, prompts, output, options, progress=False)
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens\)"):
        write_responses(target, prompts, output, ResponseOptions(greedy=1.0, max_new_tokens=7), progress=False)
    with pytest.raises(ValueError, match=r"other settings \(num_prompts, prompts_sha256\)"):
        write_responses(target, prompts[:4], output, options, progress=False)
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[0] + b'{"half\n' + b"".join(lines[2:]))
    with pytest.raises(ValueError, match="line 2 is damaged"):
        write_responses(target, prompts, output, options, progress=False)


def test_shards_share_the_prompts(tmp_path, prompts):
    target, options = targets.build("qwen3"), ResponseOptions(max_new_tokens=4)
    keys = []
    for number in range(3):
        write_responses(target, prompts, tmp_path / f"{number}", options, shard=(number, 3), progress=False)
        keys += by_key(tmp_path / f"{number}")
    assert sorted(keys) == [(number, 0) for number in range(8)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files as Linux does")
def test_a_full_disk_keeps_finished_responses(tmp_path, prompts):
    target, output = targets.build("qwen3"), tmp_path / "out.jsonl"
    options = ResponseOptions(greedy=1.0, max_new_tokens=40)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(OSError, match="make room and run this again"):
            write_responses(target, prompts, output, options, batch_size=2, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finished = output.read_bytes().count(b"\n")
    assert finished >= 2
    assert write_responses(target, prompts, output, options, batch_size=2, progress=False) == 8 - finished
    assert len(by_key(output)) == 8


def test_out_of_memory_halves_the_batch(tmp_path, prompts, monkeypatch):
    target, sizes = targets.build("qwen3"), []
    generate = target.generate

    def small_generate(input_ids, **kwargs):
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("too much")
        return generate(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(target, "generate", small_generate)
    options = ResponseOptions(greedy=1.0, max_new_tokens=3)
    assert write_responses(target, prompts, tmp_path / "out", options, batch_size=8, progress=False) == 8
    assert sizes[:3] == [8, 4, 2] and len(by_key(tmp_path / "out")) == 8


CHAT = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking %}t{% endif %}a:{% endif %}"
)


def test_prompts_take_the_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    rows = [{"prompt": "hi", "source": "x"}, {"messages": [{"role": "user", "content": "yo"}]}, {"prompt_ids": [5, 6]}]

    def texts(**options):
        return [tokenizer.decode(prompt.ids) for prompt in tokenize_prompts(rows[:2], tokenizer, **options)]

    assert texts() == ["u:hi;a:", "u:yo;a:"]
    assert texts(thinking=True) == ["u:hi;ta:", "u:yo;ta:"]
    assert texts(thinking=False, system="be") == ["s:be;u:hi;a:", "s:be;u:yo;a:"]
    assert [prompt.ids for prompt in tokenize_prompts(rows[2:], None)] == [[5, 6]]
    assert [prompt.fields for prompt in tokenize_prompts(rows[:1], tokenizer)] == [{"source": "x", "prompt": "hi"}]
    assert len(tokenize_prompts(rows[:1] * 5, tokenizer, chat=False, limit=3)) == 3
    (prompt,) = tokenize_prompts([{"q": "ab"}], tokenizer, column="q", chat=False)
    assert tokenizer.decode(prompt.ids) == "ab"
    with pytest.raises(ValueError, match="Prompt 0 has no `prompt`"):
        tokenize_prompts([{"text": "x"}], tokenizer)
    with pytest.raises(ValueError, match="none short enough"):
        tokenize_prompts(rows, tokenizer, max_tokens=1)
    with pytest.raises(ValueError, match="no tokenizer"):
        tokenize_prompts(rows, None)


def test_prompts_come_from_files_or_the_hub(tmp_path, monkeypatch):
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert [row["prompt"] for row in read_prompts(file)] == ["a", "b"]
    file.write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        list(read_prompts(file))
    with pytest.raises(OSError, match="no file"):
        list(read_prompts(tmp_path / "missing.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(read_prompts("someone/prompts"))
    hub = types.SimpleNamespace(load_dataset=lambda name, config, split: [{"prompt": f"{name} {config} {split}"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(read_prompts("someone/prompts", split="test", config="c")) == [{"prompt": "someone/prompts c test"}]


def test_response_options_are_checked():
    for options, message in (
        ({"responses": 2, "greedy": 0.7}, "at most one per prompt"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"responses": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ResponseOptions(**options)


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_of(tmp_path, lengths, **options):
    rows = [{"prompt_ids": list(range(1, 1 + p)), "response_ids": list(range(40, 40 + r))} for p, r in lengths]
    return ResponseRows([write_lines(tmp_path / "rows.jsonl", rows)], vocab_size=96, **options)


def test_rows_are_cut_and_counted(tmp_path):
    rows = rows_of(tmp_path, [(4, 6), (12, 3), (3, 1), (9, 5)], max_length=12)
    assert (rows.num_sequences, rows.dropped) == (2, 2)
    assert (rows.num_tokens, rows.num_response_tokens) == (10 + 12, 6 + 3)
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 40, 41, 42, 43, 44, 45, 0, 0], [*range(1, 10), 40, 41, 42]]
    assert batch["loss_mask"].int().tolist() == [[0] * 4 + [1] * 6 + [0] * 2, [0] * 9 + [1] * 3]
    assert set(batch) == {"input_ids", "loss_mask", "rows", "lengths"} and batch["rows"].tolist() == [0, 1]
    assert batch["lengths"].tolist() == [10, 12]
    assert rows.token_counts(96)[40].item() == 2


def test_packed_rows_hold_every_sequence_once(tmp_path):
    lengths = [(2 + i % 3, 3 + i % 5) for i in range(40)]
    rows = rows_of(tmp_path, lengths, max_length=24, packing=True)
    assert len(rows) < 20
    items = [rows[number] for number in range(len(rows))]
    assert sum(len(item["sequences"]) for item in items) == 40
    assert all(sum(len(ids) for ids, _ in item["sequences"]) <= 24 for item in items)
    item = max(items, key=lambda item: len(item["sequences"]))
    batch = collate([item])
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) == len(item["sequences"])
    for number, (start, (ids, prompt)) in enumerate(zip(starts, item["sequences"])):
        part = slice(start, start + len(ids))
        assert batch["input_ids"][0, part].tolist() == ids.tolist()
        assert batch["segment_ids"][0, part].tolist() == [number] * len(ids)
        assert batch["loss_mask"][0, part].int().tolist() == [0] * prompt + [1] * (len(ids) - prompt)


def test_packing_wastes_little():
    lengths = torch.randint(20, 400, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 2048, seed=1)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert sum(lengths) / (len(rows) * 2048) > 0.95
    assert pack(lengths, 2048, seed=1) == rows != pack(lengths, 2048, seed=2)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt_ids": [1], "respo', "line 2 is not valid JSON"),
        ('{"prompt": "x", "response": "y"}', "line 2 has no `prompt_ids`"),
        ('{"prompt_ids": [1], "response_ids": [3, 96]}', "line 2: `response_ids` must be a list of .* 0 to 95"),
        ('{"prompt_ids": "1", "response_ids": [3]}', "line 2: `prompt_ids` must be"),
    ],
)
def test_damaged_data_is_named(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt_ids": [1], "response_ids": [3, 4, 5]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        ResponseRows([file], vocab_size=96)


def test_uniforms_depend_on_the_row_not_on_its_batch():
    together = row_uniforms(torch.tensor([7, 3]), 50, seed=1, step=9)
    assert torch.equal(together[1], row_uniforms(torch.tensor([3]), 50, seed=1, step=9)[0])
    assert torch.equal(together[0, :30], row_uniforms(torch.tensor([7]), 30, seed=1, step=9)[0])
    assert not torch.equal(together[0], row_uniforms(torch.tensor([7]), 50, seed=1, step=10)[0])
    assert not torch.equal(together[0], together[1])


# Vocabulary -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_soft_counts_are_the_targets_probabilities(tmp_path, packing):
    target = targets.build("qwen3")
    rows = rows_of(tmp_path, [(4, 6), (3, 9), (2, 5)], max_length=24, packing=packing)
    counts = soft_counts(rows, TargetFeatures(target, [1], CPU), batch_size=2, progress=False)
    expected = torch.zeros(96, dtype=torch.float64)
    for prompt, response in [(4, 6), (3, 9), (2, 5)]:
        ids = torch.tensor([list(range(1, 1 + prompt)) + list(range(40, 40 + response))])
        with torch.no_grad():
            expected += target(ids).logits[0, prompt - 1 : -1].softmax(-1).double().sum(0)
    torch.testing.assert_close(counts, expected, atol=1e-4, rtol=1e-4)


def test_vocabulary_holds_the_largest_and_the_required():
    counts = torch.tensor([5.0, 0.0, 9.0, 1.0, 1.0, 0.0])
    assert choose_vocabulary(counts, 3).tolist() == [0, 2, 3]
    assert choose_vocabulary(counts, 3, required=[5, 5]).tolist() == [0, 2, 5]
    assert coverage(counts, torch.tensor([0, 2])) == pytest.approx(14 / 16)
    for size in (1, 7):
        with pytest.raises(ValueError, match="draft vocabulary must have more than 1 and at most 6"):
            choose_vocabulary(counts, size, required=[5])


def test_reduced_draft_takes_the_targets_head_rows():
    target = targets.build("qwen3")
    draft, _ = new_draft(target, DraftOptions(num_layers=1, mask_token_id=1, markov_rank=4, draft_vocab_size=10))
    token_ids = torch.tensor([2, 3, 5, 8, 13, 21, 34, 55, 89, 95])
    set_vocabulary(draft, target, token_ids)
    assert torch.equal(draft.draft_to_target, token_ids)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[token_ids])
    assert draft.config.stores_head and not draft.config.stores_embedding


# New drafts -----------------------------------------------------------------------------------------------------------


def test_default_taps():
    assert default_taps(36) == [1, 9, 17, 25, 33]  # as the published drafts for a target of 36 layers
    assert default_taps(30) == [1, 8, 14, 20, 27]
    assert [default_taps(depth) for depth in (1, 2, 3, 4, 5)] == [[0], [1], [1, 2], [1, 2], [1, 2]]


def layer_errors(target, draft, options):
    """How far each draft layer, run causally on the target's own states, is from the layer it started from."""
    layers, config = decoder_layers(target), draft.config
    ids, errors = torch.arange(10, 20)[None], []
    for layer, source in zip(draft.layers, _source_layers(layers, options)):
        capture = TapCapture(layers, [source - 1, source], CPU, torch.float32)
        with torch.no_grad(), capture.installed():
            target.get_decoder()(input_ids=ids, use_cache=False)
            before, after = capture.take().chunk(2, dim=-1)
            cos, sin = draft.rotary(torch.arange(10)[None], torch.float32)
            groups = config.num_attention_heads // config.num_key_value_heads
            mask = torch.ones(10, 10, dtype=torch.bool).tril()[None, None].repeat(1, 1, groups, 1)
            output = layer(before, cos, sin, mask, lambda keys, values: (keys, values))
        errors.append(((output - after).norm() / (after - before).norm()).item())
    return errors


# Layers with a sliding window of 9 differ in the last of 10 tokens, so the last layer, a full one, is compared.
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
def test_warm_start_does_what_the_targets_layers_do(name):
    target, options = targets.build(name), DraftOptions(num_layers=2, mask_token_id=1, markov_rank=4)
    draft, notes = new_draft(target, options)
    assert notes == []
    assert layer_errors(target, draft, options)[-1] < 1e-4
    draft.validate_target(target)
    random, _ = new_draft(target, DraftOptions(num_layers=2, mask_token_id=1, markov_rank=4, warm_start=False))
    assert layer_errors(target, random, options)[-1] > 0.5


@pytest.mark.parametrize("name", sorted(targets.BATCHED))
def test_every_target_gets_a_draft(name):
    """Whatever cannot be taken over is named; features and logits are the target's own."""
    target = targets.build(name)
    draft, notes = new_draft(target, DraftOptions(num_layers=2, mask_token_id=1, markov_rank=4))
    draft.validate_target(target)
    odd = {"deepseek_v3", "gemma4_kv_shared", "gpt_oss", "mixtral", "qwen3_moe", "glm4", "olmo2", "olmo3", "cohere2"}
    assert bool(notes) == (name in odd), notes
    features = TargetFeatures(target, draft.config.target_layer_ids, CPU)
    ids = torch.arange(10, 30).view(2, 10)
    taps, final = features(ids)
    with torch.no_grad():
        logits = target(ids, use_cache=False).logits
    torch.testing.assert_close(features.head(final), logits, atol=2e-4, rtol=1e-4)
    assert taps.shape == (2, 10, len(draft.config.target_layer_ids) * 64)
    # The draft's own head, fed with the target's last states, gives the target's logits too.
    decoder_norm = getattr(target.get_decoder(), "norm", None)
    if decoder_norm is not None:
        shared = draft.shared_weights(target)
        with torch.no_grad():
            own = draft.compute_base_logits(final * features.head.scale, shared)
        torch.testing.assert_close(own, logits, atol=2e-4, rtol=1e-4)


def test_packed_rows_give_the_target_the_same_states():
    for name in ("llama", "qwen3", "gemma3", "mistral"):
        TargetFeatures(targets.build(name, "sdpa"), [1], CPU).check_packing()
    with pytest.raises(ValueError, match="train without packing"):
        TargetFeatures(targets.build("mamba"), [1], CPU).check_packing()


def test_logits_and_embeddings_that_are_scaled():
    assert TargetHead(targets.build("granite")).scale == pytest.approx(1 / 1.5, rel=1e-4)
    assert TargetHead(targets.build("gemma2")).softcap == 30.0
    assert TargetHead(targets.build("qwen3")).scale == 1.0
    # Small logits hardly feel a cap, which must be noticed all the same, and in half precision too.
    for name, softcap in (("gemma2", 30.0), ("gemma3", None), ("qwen3", None)):
        target = copy.deepcopy(targets.build(name)).bfloat16()
        assert (TargetHead(target).scale, TargetHead(target).softcap) == (1.0, softcap)
        target.get_output_embeddings().weight.data *= 0.01
        assert (TargetHead(target).scale, TargetHead(target).softcap) == (1.0, softcap)
    assert [embedding_factor(targets.build(name)) for name in ("granite", "gemma3", "llama")] == [2.0, 8.0, 1.0]


@pytest.mark.parametrize("taps, nearest", [([0, 3], 0), ([0, 1, 3], 1), ([-1, 0], 1)])
def test_fc_starts_as_the_nearest_tap(taps, nearest):
    options = DraftOptions(num_layers=2, taps=taps, mask_token_id=1, markov_rank=4)  # layers 2 and 3, fed by 1
    draft, _ = new_draft(targets.build("qwen3"), options)
    for number, part in enumerate(draft.fc.weight.split(64, dim=1)):
        expected = torch.eye(64) if number == nearest else torch.zeros(64, 64)
        assert (part - expected).abs().max() < 0.05


def test_mask_token_is_one_that_no_text_holds():
    tokenizer, counts = byte_tokenizer(), torch.ones(96)
    counts[[17, 40]] = 0
    assert choose_mask_token(100, tokenizer, torch.ones(100)) == 96  # a row of the embedding without a token
    assert choose_mask_token(96, None, counts) == 40
    tokenizer.add_special_tokens({"mask_token": "<unused2>" if "<unused2>" in tokenizer.get_vocab() else "\x1f"})
    assert choose_mask_token(200, tokenizer, torch.ones(200)) == tokenizer.mask_token_id


def test_options_that_do_not_fit_are_named():
    target = targets.build("qwen3")
    for options, message in (
        ({"taps": [1, 4]}, "`taps`: the target has layers 0 to 3, got 4"),
        ({"num_layers": 2, "source_layers": [1]}, "`source_layers` must name one layer for each of the 2"),
        ({"num_layers": 1}, "`mask_token_id` is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            new_draft(target, DraftOptions(**options))

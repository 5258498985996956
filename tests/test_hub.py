"""The Hub for real: the client as it is, against a server on loopback that speaks its protocol.

One process does all that needs a network, a second one runs offline on its cache.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import packagings
import pytest
from hub_server import Hub, Repo
from packagings import base_draft, checksum, dflash_draft, write
from safetensors.torch import save_file

HERE = Path(__file__).parent
ONLINE = (
    "plain again other_cache forced older_revision wrong_revision no_repository private sharded subfolder "
    "missing_subfolder truncated pickled gguf embedded other_model lost_shard auto_classes inspected inspect_command "
    "converted pushed push_without_token"
).split()
OFFLINE = ["plain", "sharded", "subfolder", "auto_classes", "no_repository"]


def contents(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {prefix + path.name: path.read_bytes() for path in folder.iterdir()}


def sharded_files(folder: Path, config: dict, tensors: dict) -> dict[str, bytes]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        chosen = {name: tensor.clone() for name, tensor in tensors.items() if shards[name] == shard}
        save_file(chosen, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return contents(folder)


def fill(hub: Hub, folder: Path) -> dict[str, float]:
    """Puts the repositories on the server; returns the checksums of what they hold."""
    newer, older = base_draft(seed=1), base_draft(seed=2)
    config, tensors = packagings.deepspec(newer)
    files = contents(write(folder / "newer", config, tensors))
    old_files = contents(write(folder / "older", *packagings.deepspec(older)))
    newer.save_pretrained(folder / "own")
    sharded = sharded_files(folder / "sharded", config, tensors)
    dflash2 = json.dumps(config | {"architectures": ["DFlash2DraftModel"]}).encode()
    v4 = {"model_type": "deepseek_v4", "dspark_block_size": 5, "dspark_target_layer_ids": [40, 41, 42]}
    lost = {name: content for name, content in sharded.items() if "00002-of" not in name}
    content = {
        "org/draft": old_files,
        "org/sharded": sharded,
        "org/several": contents(folder / "newer", "inner/"),
        "org/private": files,
        "org/truncated": files,
        "org/pickled": {"config.json": files["config.json"], "pytorch_model.bin": b"x"},
        "org/gguf": {"config.json": files["config.json"], "draft-Q4.gguf": b"x"},
        "org/embedded": {"config.json": json.dumps(v4).encode(), "model.safetensors": files["model.safetensors"]},
        "org/dflash2": {**sharded, "config.json": dflash2},
        "org/lost": lost,
        "org/own": contents(folder / "own"),
        "org/headers": contents(write(folder / "headers", *packagings.zlab(dflash_draft(intermediate_size=2000)))),
        "org/headers-sharded": sharded,
    }
    for name, repository_files in content.items():
        hub.repos[name] = Repo(private=name == "org/private")
        hub.repos[name].commit(repository_files)
    hub.repos["org/draft"].branches["v1"] = hub.repos["org/draft"].branches["main"]
    hub.repos["org/draft"].commit(files)
    hub.repos["org/truncated"].truncated.add("model.safetensors")
    return {"newer": checksum(newer), "older": checksum(older)}


def run_client(hub: Hub, folder: Path, names: list[str], **environment: str) -> dict:
    source = str(HERE.parent / "src")
    variables = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",  # uploads by the protocol that the server speaks
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    variables.pop("HF_TOKEN", None)
    command = [sys.executable, str(HERE / "hub_client.py"), str(folder), *names]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("RESULTS", 1)[1])


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Results of both processes, the server, and the checksums of what it held."""
    folder = tmp_path_factory.mktemp("hub")
    with Hub() as hub:
        sums = fill(hub, folder)
        online = run_client(hub, folder, ONLINE)
        asked = len(hub.requests)
        offline = run_client(hub, folder, OFFLINE, HF_HUB_OFFLINE="1")
        yield online, offline, hub, sums, asked


def test_downloaded_once(session):
    online, _, hub, sums, _ = session
    assert online["plain"] == online["again"] == online["other_cache"] == online["forced"] == sums["newer"]
    size = len(hub.repos["org/draft"].commits[hub.repos["org/draft"].branches["main"]]["model.safetensors"])
    # `plain`, `other_cache`, `forced`, and the older revision; not `again`, nor any later use
    assert hub.sent("org/draft", "model.safetensors") == [size] * 4


def test_offline_from_the_cache(session):
    online, offline, hub, sums, asked = session
    assert offline["plain"] == offline["sharded"] == offline["subfolder"] == sums["newer"]
    assert offline["auto_classes"] == online["auto_classes"]
    assert "ValueError: 'org/nothing' has no config.json that can be read" in offline["no_repository"]
    assert len(hub.requests) == asked, "nothing was asked of the server"


def test_revisions(session):
    online, _, _, sums, _ = session
    assert online["older_revision"] == sums["older"]
    assert online["wrong_revision"].startswith("ValueError: 'org/draft' has no config.json that can be read")
    assert "v9 is not a valid git identifier" in online["wrong_revision"]


def test_all_files_come_from_one_commit(session):
    _, _, hub, _, _ = session
    main = hub.repos["org/draft"].branches["main"]
    weights = [path for method, path, *_ in hub.requests if path.startswith("/org/draft/") and "safetensors" in path]
    assert weights and all(f"/resolve/{main}/" in path or f"/resolve/{_v1(hub)}/" in path for path in weights)


def _v1(hub: Hub) -> str:
    return hub.repos["org/draft"].branches["v1"]


def test_private_repository(session):
    online, _, _, sums, _ = session
    assert online["private"]["with"] == sums["newer"]
    for case in ("without", "wrong"):
        assert online["private"][case].startswith("ValueError: 'org/private' has no config.json that can be read")
    assert "token" in online["private"]["without"]
    assert "is not a local folder and is not a valid model identifier" in online["no_repository"]


def test_shards_and_subfolders(session):
    online, _, _, sums, _ = session
    assert online["sharded"] == online["subfolder"] == sums["newer"]
    assert "org/several" in online["missing_subfolder"] and "config.json" in online["missing_subfolder"]
    assert "lacks a file that its model.safetensors.index.json names" in online["lost_shard"]


def test_truncated_download(session):
    online, _, _, _, _ = session
    assert online["truncated"].startswith("ValueError: 'org/truncated' has no model.safetensors that can be read")


def test_weights_in_other_formats(session):
    online, _, hub, _, _ = session
    assert "has pickled weights only (pytorch_model.bin)" in online["pickled"]
    assert "has GGUF weights only" in online["gguf"]
    assert not hub.sent("org/pickled", "pytorch_model.bin") and not hub.sent("org/gguf", ".gguf")


def test_what_is_refused_is_not_downloaded(session):
    online, _, hub, _, _ = session
    assert "embeds its DSpark draft in a DeepSeek-V4 target" in online["embedded"]
    assert "is a DFlash2 draft" in online["other_model"]
    assert not hub.sent("org/embedded", ".safetensors") and not hub.sent("org/dflash2", ".safetensors")


def test_auto_classes_load_what_is_saved(session):
    online, _, _, sums, _ = session
    expected = {"config": "DSparkConfig", "model": "DSparkDraftModel", "sum": sums["newer"]}
    assert online["auto_classes"] == expected


def test_inspecting_fetches_headers_only(session):
    online, _, hub, _, _ = session
    found = online["inspected"]
    assert found["packaging"] == "dflash" and found["problem"] is None and found["draft"]["layout"] == "1+N"
    assert found["revision"] == hub.repos["org/headers"].branches["main"]
    assert online["inspect_command"]["status"] == 0 and "1+N: blocks of 5" in online["inspect_command"]["output"]
    assert online["inspected"]["sharded_problem"] is None and online["inspected"]["sharded_parameters"] > 20000
    stored = hub.repos["org/headers"].commits[found["revision"]]["model.safetensors"]
    sent = hub.sent("org/headers", "model.safetensors")
    assert len(stored) > 1_000_000 and len(sent) == 2 and max(sent) <= 100_001
    assert len(hub.sent("org/headers-sharded", ".safetensors")) == 2


def test_conversion_records_the_commit(session):
    online, _, hub, _, _ = session
    assert online["converted"]["revision"] == hub.repos["org/draft"].branches["main"]
    assert online["converted"]["location"] == "org/draft"


def test_pushing(session):
    online, _, hub, sums, _ = session
    result = online["pushed"]
    assert result["first"] == sums["newer"] and result["tokens"] == 3
    assert result["second"] == pytest.approx(sums["newer"] + result["width"], abs=1e-3)
    repo = hub.repos["me/pushed"]
    files = repo.commits[repo.branches["main"]]
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= files.keys()
    assert len(repo.commits) == 3, "created, pushed, saved with `push_to_hub`"
    assert online["push_without_token"] != "pushed" and "me/other" not in hub.repos

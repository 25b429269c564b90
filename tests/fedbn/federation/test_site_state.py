from __future__ import annotations

import errno
import io
import os
import pickle
import random
import stat
import subprocess
import sys
import textwrap
import time
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.files import FileError
from fedbn.federation.site_state import (
    COMPLETE_MODEL,
    FORMAT,
    LOCAL_ENTRIES,
    SHARED_WEIGHTS,
    SiteState,
    SiteStateError,
    load_checkpoint,
    network_fingerprint,
    save_checkpoint,
)
from fedbn.tasks.base import Scores


def local_entries(value=1.0):
    return {
        "norm.weight": torch.full((6,), value),
        "norm.bias": torch.linspace(-1, 1, 6),
        "norm.running_mean": torch.arange(6.0) * value,
        "norm.running_var": torch.ones(6),
        "norm.num_batches_tracked": torch.tensor(int(value)),
    }


@pytest.fixture
def state(tmp_path):
    return SiteState.under(tmp_path, job="abide", site="NYU", network="MLP-1")


BOTH = ["local_entries.pt", "local_entries_before.pt"]


def equal(a, b):
    return list(a) == list(b) and all(
        x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def all_files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------ keeping


def test_local_entries_come_back_bit_for_bit_with_their_round(state):
    assert not state.exists
    state.save_local(local_entries(), -1)
    state.save_local(local_entries(2.5), 7)
    again = SiteState.under(state.folder.parents[1], job="abide", site="NYU", network="MLP-1")
    assert again.exists
    tensors, round_number = again.load_local()
    assert equal(tensors, local_entries(2.5))
    assert round_number == 7
    assert all_files(state.folder) == BOTH


def test_the_entries_of_the_round_before_are_kept_beside_the_latest(state):
    for value, number in enumerate((-1, 0, 1, 4)):
        state.save_local(local_entries(value), number)
    for at_most, value, number in ((None, 3, 4), (9, 3, 4), (4, 3, 4), (3, 2, 1), (1, 2, 1)):
        tensors, round_number = state.load_local(at_most)
        assert (equal(tensors, local_entries(value)), round_number) == (True, number)
    with pytest.raises(
        SiteStateError, match=r"'NYU': .*NYU holds the local entries after round 4, and none after "
    ):
        state.load_local(0)


def test_a_round_that_is_trained_again_does_not_push_out_the_one_before(state):
    state.save_local(local_entries(1), 2)
    for value in (2, 3):
        state.save_local(local_entries(value), 3)
    assert equal(state.load_local(3)[0], local_entries(3))
    assert equal(state.load_local(2)[0], local_entries(1))


def test_a_damaged_file_does_not_take_the_place_of_the_entries_before(state):
    for value in (1, 2):
        state.save_local(local_entries(value), value)
    state.local_path.write_bytes(b"damaged")
    with pytest.raises(SiteStateError, match="is damaged"):
        state.load_local(1)
    state.save_local(local_entries(3), 3)
    assert equal(state.load_local(2)[0], local_entries(1))
    state.save_local(local_entries(4), 4)
    state.earlier_local_path.write_bytes(b"damaged")
    assert state.load_local(4)[1] == 4
    with pytest.raises(SiteStateError, match=r"local_entries_before.pt is damaged"):
        state.load_local(3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.zeros(0, 3).t(),
        torch.from_numpy(np.zeros(0, np.float32) / 2),
        torch.tensor([True, False]),
        torch.tensor([-0.0, float("inf"), float("nan"), 1e-45]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float16),
        torch.ones(3, dtype=torch.complex64),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(1).expand(4),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}",
)
def test_every_tensor_can_be_kept(tmp_path, tensor):
    save_checkpoint(tmp_path / "a.pt", "kind", {"x": tensor}, {})
    loaded, meta = load_checkpoint(tmp_path / "a.pt", "kind")
    assert loaded["x"].dtype == tensor.dtype
    torch.testing.assert_close(loaded["x"], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert meta == {}


def test_a_view_does_not_carry_the_data_behind_it_into_the_file(tmp_path):
    scans = torch.arange(100_000.0)
    save_checkpoint(tmp_path / "a.pt", "kind", {"mean": scans[:3], "std": scans[3:6]}, {})
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    loaded, _ = load_checkpoint(tmp_path / "a.pt", "kind")
    assert loaded["std"].tolist() == [3, 4, 5]


def test_tied_tensors_are_kept_apart_and_later_changes_do_not_show(tmp_path):
    tied = torch.ones(3)
    save_checkpoint(tmp_path / "a.pt", "kind", {"a": tied, "b": tied}, {})
    tied.zero_()
    loaded, _ = load_checkpoint(tmp_path / "a.pt", "kind")
    loaded["a"].zero_()
    assert loaded["b"].tolist() == [1, 1, 1]


def test_preparation_and_model_come_back(state):
    facts = {"folds": [["sub-1"], ["sub-2"]], "seed": 3, "text": "Zürich"}
    state.save_preparation({"mean": torch.ones(4)}, facts)
    tensors, kept = state.load_preparation()
    assert (tensors["mean"].tolist(), kept) == ([1, 1, 1, 1], facts)
    state.save_model(local_entries(), {"round": 3})
    tensors, meta = load_checkpoint(state.model_path, COMPLETE_MODEL)
    assert equal(tensors, local_entries())
    assert meta == {"job": "abide", "site": "NYU", "network": "MLP-1", "facts": {"round": 3}}


@pytest.mark.parametrize(
    ("kind", "complete"), [(COMPLETE_MODEL, True), (SHARED_WEIGHTS, False), (LOCAL_ENTRIES, False)]
)
def test_plain_torch_can_load_it_and_sees_whether_it_is_a_model(tmp_path, kind, complete):
    save_checkpoint(tmp_path / "a.pt", kind, local_entries(), {"job": "abide"})
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content["complete_model"] is complete
    assert content["kind"] == kind
    assert equal(content["model"], local_entries())


def test_shared_weights_say_that_they_cannot_predict(tmp_path):
    save_checkpoint(tmp_path / "shared.pt", SHARED_WEIGHTS, local_entries(), {})
    with pytest.raises(SiteStateError, match=r"without any site's batch norm and cannot predict"):
        load_checkpoint(tmp_path / "shared.pt", COMPLETE_MODEL)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_entries_that_are_not_finite_are_refused_and_the_older_ones_kept(state, value):
    state.save_local(local_entries(3.0), 4)
    broken = local_entries()
    broken["norm.running_mean"][2] = value
    with pytest.raises(
        SiteStateError,
        match=r"site 'NYU': local entry 'norm.running_mean' is not finite .* round 5",
    ):
        state.save_local(broken, 5)
    tensors, round_number = state.load_local()
    assert (equal(tensors, local_entries(3.0)), round_number) == (True, 4)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\0b", ".hidden"])
def test_names_cannot_leave_the_folder(tmp_path, state, name):
    for job, site in ((name, "NYU"), ("abide", name)):
        with pytest.raises(SiteStateError, match="cannot name a folder of site state"):
            SiteState.under(tmp_path, job=job, site=site, network="n")
    with pytest.raises(SiteStateError, match="cannot name a file of scores"):
        state.save_scores(name, {"final": some_scores()})
    assert all_files(tmp_path) == []


def test_jobs_and_sites_do_not_mix(tmp_path):
    states = {}
    for value, (job, site) in enumerate(
        [("a", "NYU"), ("a", "UM"), ("b", "NYU"), ("a b", "Sankt Gallen")]
    ):
        kept = SiteState.under(tmp_path, job=job, site=site, network="n")
        kept.save_local(local_entries(value), value)
        states[value] = kept
    for value, kept in states.items():
        assert kept.load_local()[1] == value
        assert equal(kept.load_local()[0], local_entries(value))


@pytest.mark.parametrize("key", ["job", "site", "network"])
def test_a_file_of_another_job_site_or_network_is_refused(tmp_path, state, key):
    state.save_local(local_entries(), 1)
    state.save_preparation({}, {})
    names = {"job": "abide", "site": "NYU", "network": "MLP-1", key: "other"}
    other = SiteState(state.folder, **names)
    for load in (other.load_local, other.load_preparation):
        with pytest.raises(SiteStateError, match=rf"belongs to {key} .*, not to 'other'"):
            load()


def test_fingerprint_names_class_names_shapes_and_dtypes():
    base = {"a": torch.zeros(2), "b": torch.zeros(3)}
    print_of_base = network_fingerprint("MLP", base)
    assert print_of_base.startswith("MLP-")
    assert print_of_base == network_fingerprint("MLP", {k: v + 1 for k, v in base.items()})
    others = [
        network_fingerprint("CNN", base),
        network_fingerprint("MLP", {"a": torch.zeros(2)}),
        network_fingerprint("MLP", {"a": torch.zeros(2, 1), "b": torch.zeros(3)}),
        network_fingerprint("MLP", {"a": torch.zeros(2).double(), "b": torch.zeros(3)}),
        network_fingerprint("MLP", {"a": torch.zeros(2), "c": torch.zeros(3)}),
    ]
    assert len({print_of_base, *others}) == 6


# ------------------------------------------------------------------------------------------ scores


def some_scores(n=3):
    columns = {"target": np.arange(n) % 2, "p_1": np.linspace(0, 1, n)}
    windows = Scores(np.repeat(np.arange(n), 2), {"p_1": np.linspace(0, 1, 2 * n)})
    return Scores(np.arange(n), columns, windows, {"threshold": 0.5})


def test_scores_come_back_sorted_by_name(state):
    assert state.load_scores() == {}
    state.save_scores("round-1", {"before/test": some_scores(), "after/test": some_scores(4)})
    state.save_scores("round-0", {"final": some_scores(0)})
    kept = state.load_scores()
    assert list(kept) == ["round-0", "round-1"]
    assert kept["round-1"] == {"before/test": some_scores(), "after/test": some_scores(4)}
    assert kept["round-1"]["before/test"] != some_scores(4)
    assert kept["round-0"]["final"].columns["p_1"].shape == (0,)


def test_scores_with_python_objects_are_refused(state):
    objects = Scores(np.arange(1), {"subject": np.array([{}], dtype=object)})
    with pytest.raises(SiteStateError, match=r"array 'final/column\.subject' holds Python objects"):
        state.save_scores("round-0", {"final": objects})
    assert state.load_scores() == {}


def test_damaged_scores_are_named(state):
    state.save_scores("round-0", {"final": some_scores(50)})
    path = state.folder / "predictions" / "round-0.npz"
    whole = path.read_bytes()
    for position in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(flipped(whole, position))
        try:
            kept = state.load_scores()["round-0"]
        except SiteStateError as error:
            assert "round-0.npz" in str(error)  # noqa: PT017 - either outcome is right
        else:
            assert kept["final"] == some_scores(50)
    path.write_bytes(whole[:-30])
    with pytest.raises(
        SiteStateError, match=r"site 'NYU': predictions file .*round-0.npz is damag"
    ):
        state.load_scores()


# ------------------------------------------------------------------------------------ writing fails


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", BOTH)
def test_a_full_disk_leaves_the_older_file_and_one_sentence(state, monkeypatch, name):
    """Wherever the disk is full: at the copy of the older entries, or at the new ones."""
    state.save_local(local_entries(1.0), 1)
    before = state.local_path.read_bytes()
    # Of a file and of its folder: two calls are those of the copy.
    calls = iter((os.fsync, os.fsync) if name == "local_entries.pt" else ())
    monkeypatch.setattr(os, "fsync", lambda *a: next(calls, no_space)(*a))
    with pytest.raises(
        FileError, match=f"{name} is not written and stays .*No space left"
    ) as caught:
        state.save_local(local_entries(2.0), 2)
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert state.local_path.read_bytes() == before
    assert set(all_files(state.folder)) <= set(BOTH)
    assert state.load_local()[1] == 1
    state.save_local(local_entries(2.0), 2)
    assert [state.load_local(number)[1] for number in (2, 1)] == [2, 1]


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_what_holds_batch_norm_or_subjects_is_the_owner_s_alone(state, umask):
    """The shared weights are no site's: they follow the umask, and keep the mode that they had."""
    before = os.umask(umask)
    try:
        for number in (1, 2):
            state.save_local(local_entries(), number)
        state.save_best({}, local_entries(), 1)
        state.save_preparation({"train": torch.arange(3)}, {})
        state.save_model(local_entries(), {})
        state.save_scores("final", {"federated": some_scores(3)})
        shared = state.folder / "shared.pt"
        save_checkpoint(shared, SHARED_WEIGHTS, local_entries(), {})
        assert mode(shared) == 0o666 & ~umask
        shared.chmod(0o640)
        save_checkpoint(shared, SHARED_WEIGHTS, local_entries(), {})
    finally:
        os.umask(before)
    modes = {path.name: mode(path) for path in state.folder.rglob("*") if path.is_file()}
    assert modes.pop("shared.pt") == 0o640
    assert set(modes.values()) == {0o600}
    assert len(modes) == 6


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_link_to_another_disk_is_followed_and_stays(state, tmp_path):
    (tmp_path / "disk").mkdir()
    state.folder.parent.mkdir(parents=True)
    state.folder.symlink_to(tmp_path / "disk")
    state.save_local(local_entries(), 1)
    (tmp_path / "elsewhere.pt").write_bytes(state.local_path.read_bytes())
    state.local_path.unlink()
    state.local_path.symlink_to(tmp_path / "elsewhere.pt")
    state.save_local(local_entries(2.0), 2)
    assert state.folder.is_symlink()
    assert state.local_path.is_symlink()
    assert state.load_local()[1] == 2
    assert all_files(tmp_path / "disk") == BOTH


def test_json_without_a_meaning_is_refused_before_the_file_is_touched(tmp_path):
    (tmp_path / "a.pt").write_text("1")
    with pytest.raises(ValueError):
        save_checkpoint(tmp_path / "a.pt", "kind", {}, {"score": float("nan")})
    assert (tmp_path / "a.pt").read_text() == "1"


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into any folder"
)
def test_a_read_only_folder(state):
    state.save_local(local_entries(), 1)
    state.folder.chmod(0o500)
    try:
        with pytest.raises(
            FileError, match=r"local_entries\.pt is not written .*Permission denied"
        ):
            state.save_local(local_entries(2.0), 2)
        assert state.load_local()[1] == 1
    finally:
        state.folder.chmod(0o700)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "abide").write_text("a file stands where the folder should be")
    state = SiteState.under(tmp_path, job="abide", site="NYU", network="n")
    with pytest.raises(FileError, match=r"local_entries\.pt is not written"):
        state.save_local(local_entries(), 1)
    assert all_files(tmp_path) == ["abide"]


def test_a_missing_file_is_named(state):
    with pytest.raises(
        SiteStateError, match=r"site 'NYU': local entries file local_entries.pt is m"
    ):
        state.load_local()


LIMITED = """
    import resource, signal, sys, torch
    from pathlib import Path
    from data_prep.files import FileError
    from fedbn.federation.site_state import SiteState
    state = SiteState.under(Path(sys.argv[1]), job="abide", site="NYU", network="n")
    state.save_local({"x": torch.zeros(10)}, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        state.save_local({"x": torch.zeros(100_000)}, 2)
    except FileError as error:
        print(error)
    print(state.load_local()[1])
"""


def python(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_the_system_refuses_to_write_more(tmp_path):
    """The real thing, not a patched call: torch.save would raise a RuntimeError of its own."""
    process, path = python(LIMITED, tmp_path), tmp_path / "abide/NYU/local_entries.pt"
    out, err = process.communicate(timeout=120)
    assert out.splitlines() == [
        f"{path} is not written and stays as it was (File too large); free some space, or name "
        "another place",
        "1",
    ], err
    assert all_files(tmp_path) == BOTH


SAVING = """
    import sys, torch
    from pathlib import Path
    from fedbn.federation.site_state import SiteState
    state = SiteState.under(Path(sys.argv[1]), job=sys.argv[2], site="NYU", network="n")
    first, last = int(sys.argv[3]), int(sys.argv[4])
    for round_number in range(first, last):
        state.save_local({"x": torch.full((30_000,), float(round_number))}, round_number)
        print(round_number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_while_saving_the_last_whole_state_is_there(tmp_path):
    wait = random.Random(0)
    state = SiteState.under(tmp_path, job="abide", site="NYU", network="n")
    state.save_local({"x": torch.zeros(30_000)}, 0)
    state.save_local({"x": torch.ones(30_000)}, 1)
    round_number = 1
    # Forked, so that twelve kills do not cost twelve imports of torch.
    for _ in range(12):
        child = os.fork()
        if child == 0:
            for number in range(round_number + 1, 10**6):
                tensors = {"x": torch.full((30_000,), float(number))}
                state.save_local(tensors, number)
        time.sleep(0.05 + wait.random() * 0.1)
        os.kill(child, 9)
        assert os.waitpid(child, 0)[1] == 9
        tensors, round_number = state.load_local()
        assert torch.equal(tensors["x"], torch.full((30_000,), float(round_number)))
        tensors, meta = load_checkpoint(state.earlier_local_path, LOCAL_ENTRIES)
        assert meta["round"] in (round_number - 1, round_number)
        assert torch.equal(tensors["x"], torch.full((30_000,), float(meta["round"])))
    state.save_local({"x": torch.zeros(1)}, 10**6)
    assert all_files(tmp_path) == BOTH


@pytest.mark.slow
def test_processes_of_two_jobs_do_not_mix(tmp_path):
    processes = {
        job: python(SAVING, tmp_path, job, first, first + 20)
        for job, first in (("spring", 0), ("autumn", 1000))
    }
    for job, process in processes.items():
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        state = SiteState.under(tmp_path, job=job, site="NYU", network="n")
        tensors, round_number = state.load_local()
        assert round_number == {"spring": 19, "autumn": 1019}[job]
        assert torch.equal(tensors["x"], torch.full((30_000,), float(round_number)))


# ---------------------------------------------------------------------------------- damage is named


def flipped(content, position, mask=0xFF):
    return content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :]


def test_flipped_bytes_are_found_wherever_they_are(state):
    original = {**local_entries(), "payload": torch.linspace(0, 1, 2000)}
    state.save_local(original, 3)
    whole = state.local_path.read_bytes()
    payload = whole.index(original["payload"].numpy().tobytes()[:64])
    draw = random.Random(1)
    positions = draw.sample(range(len(whole)), 150)
    positions += [draw.randrange(payload, payload + 8000) for _ in range(50)]
    found = 0
    for position in positions:
        state.local_path.write_bytes(flipped(whole, position, 1 << draw.randrange(8)))
        try:
            tensors, round_number = state.load_local()
        except SiteStateError as error:
            found += 1
            assert "local_entries.pt" in str(error)  # noqa: PT017 - either outcome is right
            assert "site 'NYU'" in str(error)  # noqa: PT017
        else:  # a byte that means nothing: padding, a time stamp of the archive
            assert not payload <= position < payload + 8000
            assert equal(tensors, original)
            assert round_number == 3
    assert found >= 100


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_found(state, part):
    state.save_local(local_entries(), 3)
    whole = state.local_path.read_bytes()
    state.local_path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(
        SiteStateError, match=r"site 'NYU': local entries file .* is damaged or not"
    ):
        state.load_local()


class Code:
    """A pickle that would touch a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def torchscript_bytes():
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Identity()), buffer)
    return buffer.getvalue()


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("error")  # PyTorch's own are paragraphs
def test_code_in_a_file_is_never_executed(state, tmp_path):
    trap = tmp_path / "executed"
    state.save_local(local_entries(), 3)
    for content in (
        pickle.dumps(Code(trap)),
        pickle.dumps({"format": FORMAT, "kind": Code(trap)}),
        torch_bytes({"format": FORMAT, "kind": LOCAL_ENTRIES, "model": Code(trap)}),
        torchscript_bytes(),
    ):
        state.local_path.write_bytes(content)
        with pytest.raises(SiteStateError, match="is damaged or not a fedbn file"):
            state.load_local()
    assert not trap.exists()


def test_text_an_array_and_other_archives_are_refused(state):
    state.save_local(local_entries(), 3)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "text")
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for content in (b"some text\n" * 100, b"\0" * 5000, archive.getvalue(), array.getvalue()):
        state.local_path.write_bytes(content)
        with pytest.raises(
            SiteStateError, match=r"local_entries.pt is damaged or not a fedbn file"
        ):
            state.load_local()


@pytest.mark.parametrize("content", [torch.ones(3), {"x": torch.ones(3)}, {"format": "v9"}, [], 1])
def test_a_foreign_checkpoint_is_refused(state, content):
    state.save_local(local_entries(), 3)
    state.local_path.write_bytes(torch_bytes(content))
    with pytest.raises(SiteStateError, match=rf"local_entries.pt is not a {FORMAT} file"):
        state.load_local()


def test_a_file_of_another_kind_is_refused(state):
    state.save_preparation({"mean": torch.ones(2)}, {})
    state.preparation_path.rename(state.local_path)
    with pytest.raises(SiteStateError, match="holds 'preparation', expected 'local entries'"):
        state.load_local()


def without(key):
    def change(content):
        del content[key]

    return change


def with_(**changes):
    return lambda content: content.update(changes)


def swap(content):
    model = content["model"]
    model["norm.weight"], model["norm.bias"] = model["norm.bias"], model["norm.weight"]


def change_model(name, value):
    return lambda content: content["model"].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        swap,
        change_model("norm.weight", torch.full((6,), 1.0 + 2**-23)),
        change_model("norm.weight", torch.ones(6, dtype=torch.float64)),
        change_model("norm.weight", torch.ones(6, 1)),
        change_model("norm.weight", 3),
        change_model("norm.weight", torch.ones(6).to_sparse()),
        change_model("extra", torch.ones(1)),
        change_model(7, torch.ones(1)),
        lambda content: content["model"].pop("norm.bias"),
        with_(model=[torch.ones(1)]),
        with_(meta='{"job": "abide", "site": "NYU", "network": "MLP-1", "round": 9}'),
        with_(meta={"round": 3}),
        with_(sha256="0" * 64),
        with_(sha256=None),
        with_(complete_model=True),
        without("model"),
        without("meta"),
        without("sha256"),
        without("complete_model"),
    ],
)
def test_content_that_does_not_fit_its_checksum_is_refused(state, change):
    state.save_local(local_entries(), 3)
    content = torch.load(state.local_path, weights_only=True)
    change(content)
    state.local_path.write_bytes(torch_bytes(content))
    with pytest.raises(
        SiteStateError, match=r"site 'NYU': .*local_entries.pt is corrupted: its ch"
    ):
        state.load_local()


def test_a_file_that_cannot_be_read_is_not_called_damaged(state, monkeypatch):
    state.save_local(local_entries(), 3)

    def denied(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(SiteStateError, match=r"cannot read local entries file .*Permission denied"):
        state.load_local()

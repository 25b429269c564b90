import errno
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from data_prep import files
from data_prep.files import (
    BusyError,
    FileError,
    atomic_file,
    atomic_folder,
    followed,
    lock,
    recover_folder,
    write_json,
    write_text,
)

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX modes and links")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return sorted(child.name for child in folder.iterdir())


def write_folder(path, content, **options):
    with atomic_folder(path, **options) as folder:
        (folder / "a").write_text(content)
        (folder / "inner").mkdir()
        (folder / "inner" / "b").write_text(content)


@pytest.fixture(params=["file", "folder"])
def write(request):
    """Write a file or a folder; what is read back is its content."""
    if request.param == "file":
        return write_text
    return write_folder


def read(path):
    return (path / "inner" / "b").read_text() if path.is_dir() else path.read_text()


@pytest.fixture
def umask():
    before = os.umask(0)
    yield os.umask
    os.umask(before)


# ------------------------------------------------------------------------------- whole or not there


def test_what_is_written_replaces_what_was_there_and_leaves_nothing_beside(tmp_path, write):
    for content in ("first", "second"):
        write(tmp_path / "deep" / "x", content)
        assert read(tmp_path / "deep" / "x") == content
        assert names(tmp_path / "deep") == ["x"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
@pytest.mark.parametrize("target", [atomic_file, atomic_folder])
def test_an_error_leaves_the_old_content_and_nothing_beside(tmp_path, write, target, error):
    path = tmp_path / "x"
    if target is atomic_folder:
        write_folder(path, "old")
    else:
        write_text(path, "old")
    with pytest.raises(error if error is not OSError else FileError), target(path):
        raise error("interrupted")
    assert read(path) == "old"
    assert names(tmp_path) == ["x"]


def test_a_folder_replaces_all_of_the_older_one(tmp_path):
    write_folder(tmp_path / "x", "old")
    with atomic_folder(tmp_path / "x") as folder:
        (folder / "only").write_text("new")
    assert names(tmp_path / "x") == ["only"]


KILLED = """
import os, sys
from pathlib import Path
from data_prep import files
from data_prep.files import atomic_file, atomic_folder
path, kind, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if when == "between the renames":
    rename = Path.rename
    def die(self, target):
        if self.name.endswith(".partial"):
            os._exit(9)
        return rename(self, target)
    Path.rename = die
with (atomic_file if kind == "file" else atomic_folder)(path) as place:
    if kind == "file":
        place.write(b"half")
        place.flush()
    else:
        (place / "half").write_text("half")
    if when == "writing":
        os._exit(9)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("old", [True, False])
def test_a_killed_writer_leaves_the_old_content_or_none(tmp_path, kind, old):
    path, write = tmp_path / "x", write_text if kind == "file" else write_folder
    if old:
        write(path, "old")
    command = [sys.executable, "-c", KILLED, str(path), kind, "writing"]
    assert subprocess.run(command, check=False).returncode == 9
    assert ".x.partial" in names(tmp_path)
    assert (read(path) == "old") if old else not path.exists()
    write(path, "new")
    assert read(path) == "new"
    assert names(tmp_path) == ["x"]


def test_a_folder_that_had_stepped_aside_is_put_back(tmp_path):
    write_folder(tmp_path / "x", "old")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "x"), "folder", "between the renames"]
    assert subprocess.run(command, check=False).returncode == 9
    assert not (tmp_path / "x").exists()
    recover_folder(tmp_path / "x")
    assert read(tmp_path / "x") == "old"
    assert names(tmp_path) == ["x"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    write_folder(tmp_path / "x", "old")
    rename = files.Path.rename

    def fail(self, target):
        if self.name == ".x.partial":
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(files.Path, "rename", fail)
    with pytest.raises(FileError, match=r"x is not written and stays as it was \(Input/output err"):
        write_folder(tmp_path / "x", "new")
    assert read(tmp_path / "x") == "old"
    assert names(tmp_path) == ["x"]


# ------------------------------------------------------------------------------------------ links


@posix
@pytest.mark.parametrize("there", ["full", "missing"])
def test_a_link_is_followed_and_stays(tmp_path, write, there):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "x")
    if there == "full":
        write(tmp_path / "disk" / "x", "old")
    for content in ("new", "newer"):
        write(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert read(tmp_path / "disk" / "x") == content
    assert names(tmp_path) == ["disk", "link"]
    assert names(tmp_path / "disk") == ["x"]


@posix
def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    write_folder(tmp_path / "link", "new")
    assert read(tmp_path / "disk") == "new"
    assert (tmp_path / "link").is_symlink()


@posix
@pytest.mark.parametrize("inside", ["", "x"])
def test_a_link_to_a_disk_that_is_not_mounted_makes_no_folder_there(tmp_path, write, inside):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "stores")
    with pytest.raises(FileError, match=r"/link is a symbolic link to .*stores, and there is no "):
        write(tmp_path / "link" / inside, "new")
    assert names(tmp_path) == ["link"]


@posix
def test_a_link_to_itself_is_refused(tmp_path, write):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(FileError, match="/link is a symbolic link that leads back to itself"):
        write(tmp_path / "link", "new")


@posix
def test_a_device_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_followed_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert followed("x") == tmp_path.resolve() / "x"


# ------------------------------------------------------------------------------------------ modes


@posix
@pytest.mark.parametrize(("mask", "file", "folder"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_what_is_new_follows_the_umask(tmp_path, umask, mask, file, folder):
    umask(mask)
    write_text(tmp_path / "file", "")
    write_folder(tmp_path / "folder", "")
    assert mode(tmp_path / "file") == file
    assert mode(tmp_path / "folder") == mode(tmp_path / "folder" / "inner") == folder
    assert mode(tmp_path / "folder" / "inner" / "b") == file


@posix
@pytest.mark.parametrize("kept", [0o640, 0o664, 0o600])
def test_what_is_replaced_keeps_its_mode(tmp_path, umask, kept):
    umask(0o022)
    write_text(tmp_path / "file", "old")
    write_folder(tmp_path / "folder", "old")
    for path in (tmp_path / "file", tmp_path / "folder" / "inner" / "b"):
        path.chmod(kept)
    (tmp_path / "folder").chmod(0o2770)
    write_text(tmp_path / "file", "new")
    write_folder(tmp_path / "folder", "new")
    assert mode(tmp_path / "file") == mode(tmp_path / "folder" / "inner" / "b") == kept
    assert mode(tmp_path / "folder") == 0o2770
    assert mode(tmp_path / "folder" / "a") == 0o644


@posix
def test_what_is_private_is_so_whatever_was_there(tmp_path, umask):
    umask(0o002)
    for private in (False, True):
        write_text(tmp_path / "file", "", private=private)
        write_folder(tmp_path / "folder", "", private=private)
    assert mode(tmp_path / "file") == mode(tmp_path / "folder" / "inner" / "b") == 0o600
    assert mode(tmp_path / "folder") == mode(tmp_path / "folder" / "inner") == 0o700


@posix
def test_what_is_private_is_so_while_it_is_written(tmp_path, umask):
    umask(0o002)
    with atomic_folder(tmp_path / "x", private=True) as folder:
        assert mode(folder) == 0o700
    with atomic_file(tmp_path / "y", private=True) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


# ----------------------------------------------------------------------------------- one sentence


LITTLE_DISK = """
import resource, sys
from pathlib import Path
from data_prep.files import FileError, atomic_file, atomic_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path, kind = Path(sys.argv[1]), sys.argv[2]
try:
    with (atomic_file if kind == "file" else atomic_folder)(path) as place:
        with place if kind == "file" else (place / "a").open("wb") as file:
            file.write(bytes(100_000))
except FileError as error:
    print(error)
"""


@posix
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_one_sentence_and_leaves_the_old_content(tmp_path, kind):
    path = tmp_path / "x"
    (write_text if kind == "file" else write_folder)(path, "old")
    command = [sys.executable, "-c", LITTLE_DISK, str(path), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"{path} is not written and stays as it was (File too large); free some space, or name "
        "another place\n"
    )
    assert done.stderr == ""
    assert read(path) == "old"
    assert names(tmp_path) == ["x"]


LITTLE_COPY = """
import resource, shutil, signal, sys
from pathlib import Path
from data_prep.files import FileError, atomic_folder, write_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
place, source = Path(sys.argv[1]), Path(sys.argv[2])
try:
    if sys.argv[3] == "copy":
        with atomic_folder(place) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
    else:
        write_files(place, {"new 1": b"1", "new 2": bytes(100_000), "new 3": b"3"})
except FileError as error:
    print(error)
"""


@posix
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kind", ["copy", "files"])
def test_a_full_disk_among_several_files_is_one_sentence_and_leaves_none(tmp_path, kind, there):
    (tmp_path / "source").mkdir()
    for name in "ab":
        (tmp_path / "source" / name).write_bytes(bytes(100_000))
    place = tmp_path / "x"
    if there:
        write_folder(place, "old")
    command = [sys.executable, "-c", LITTLE_COPY, str(place), str(tmp_path / "source"), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    failed = place if kind == "copy" else place / "new 2"
    assert done.stdout == (
        f"{failed} is not written and stays as it was (File too large); free some space, or name "
        "another place\n"
    )
    assert names(tmp_path) == ["source"] + ["x"] * there
    assert sorted(path.name for path in place.rglob("*")) == ["a", "b", "inner"] * there


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_one_sentence():
    with pytest.raises(FileError, match=r"^/dev/full is not written .* \(No space left on device"):
        write_text("/dev/full", "x")


def test_an_error_on_another_file_names_it(tmp_path):
    with (
        pytest.raises(FileError, match=r"/x is not .* \(.*/scan.nii: No such file or directory\)$"),
        atomic_folder(tmp_path / "x"),
    ):
        (tmp_path / "scan.nii").read_bytes()


def test_a_file_in_the_place_of_a_folder_and_the_reverse(tmp_path):
    (tmp_path / "file").write_text("years of work")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="/file is a file; name a folder"):
        write_folder(tmp_path / "file", "new")
    with pytest.raises(FileError, match="/folder is a folder; name a file"):
        write_text(tmp_path / "folder", "new")
    with pytest.raises(FileError, match=r"/file/x is not written .*(Not a directory|File exists)"):
        write_text(tmp_path / "file" / "x", "new")
    assert names(tmp_path) == ["file", "folder"]


def test_a_disk_of_its_own_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    monkeypatch.setattr(files.Path, "is_mount", lambda self: self.name == "x")
    with pytest.raises(FileError, match="/x is where a disk is mounted; name a folder inside it"):
        write_folder(tmp_path / "x", "new")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_place_without_permission_is_one_sentence(tmp_path, write):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(FileError, match=r"/closed/x is not written .*\(Permission denied\)"):
        write(tmp_path / "closed" / "x", "new")


def test_json_has_no_nan(tmp_path):
    write_json(tmp_path / "x", {"é": [1]})
    assert json.loads((tmp_path / "x").read_text(encoding="utf-8")) == {"é": [1]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert "é" in (tmp_path / "x").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ locks


HOLDER = """
import sys
from data_prep.files import lock
with lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE_S", 0.01)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline().strip() == b"held"
        for write in (write_text, write_folder):
            with pytest.raises(BusyError, match=r"another run is writing .*/x now; wait until it"):
                write(tmp_path / "x", "new")
        holder.kill()
        holder.wait()
    write_folder(tmp_path / "x", "new")
    assert names(tmp_path) == ["x"]


def test_what_another_run_is_writing_is_left_to_it(tmp_path):
    with atomic_folder(tmp_path / "x") as folder:
        with pytest.raises(BusyError):
            recover_folder(tmp_path / "x")
        with pytest.raises(BusyError):
            write_folder(tmp_path / "x", "other")
        (folder / "a").write_text("mine")
    assert names(tmp_path / "x") == ["a"]


def test_a_lock_says_what_the_other_does_and_goes_with_its_end(tmp_path):
    with (
        lock(tmp_path / "workspace", "using"),
        pytest.raises(BusyError, match=r"another run is using .*/workspace now"),
        lock(tmp_path / "workspace", "using"),
    ):
        pass
    with lock(tmp_path / "workspace"):
        pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch, write):
    import filelock

    def no_locks(self, *_, **__):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", no_locks)
    write(tmp_path / "x", "new")
    assert read(tmp_path / "x") == "new"


def test_importing_it_costs_nothing():
    code = textwrap.dedent("""
        import sys
        import data_prep.files
        heavy = {"numpy", "pandas", "filelock", "rich", "typer"} & set(sys.modules)
        assert not heavy, heavy
    """)
    subprocess.run([sys.executable, "-c", code], check=True)

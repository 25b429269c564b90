"""Images are read as MONAI reads them, and damaged ones are told in one sentence."""

import subprocess
import sys

import nibabel
import numpy as np
import pytest
from PIL import Image as Pillow

from data_prep.images.reading import ImageError, read_image, read_mask


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def save_nifti(file, array, affine=None):
    affine = np.diag([2.0, 1.0, 0.5, 1.0]) if affine is None else affine
    nibabel.save(nibabel.Nifti1Image(array, affine), file)
    return file


def save_series(folder, volume, *, tilted=False, order=1, skip=(), uid="1.2.3", **tags):
    """Write (rows, columns, slices) as a DICOM series; numbers are uint16."""
    pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    folder.mkdir(parents=True, exist_ok=True)
    orientation = [0, 1, 0, 0, 0, -1] if tilted else [1, 0, 0, 0, 1, 0]
    step = np.cross(orientation[:3], orientation[3:]) * 2.5
    for k in range(volume.shape[2]):
        if k in skip:
            continue
        meta = FileMetaDataset()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = f"{uid}.{k}"
        file = FileDataset(str(folder / f"{k}.dcm"), {}, file_meta=meta, preamble=b"\0" * 128)
        file.SOPClassUID, file.SOPInstanceUID = CTImageStorage, f"{uid}.{k}"
        file.SeriesInstanceUID, file.InstanceNumber = uid, order * k + 100
        file.ImageOrientationPatient = orientation
        file.ImagePositionPatient = [float(x) for x in np.array([5, 6, 7]) + k * step]
        file.PixelSpacing = [0.5, 0.75]
        file.Rows, file.Columns = volume.shape[:2]
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated = file.BitsStored = 16
        file.HighBit, file.PixelRepresentation = 15, 0
        file.RescaleSlope, file.RescaleIntercept = 2, -1000
        for name, value in tags.items():
            setattr(file, name, value)
        file.PixelData = volume[:, :, k].astype(np.uint16).tobytes()
        file.save_as(folder / f"{k}.dcm", enforce_file_format=True)
    return folder


def write_all_formats(folder, rng):
    """Write a file of each kind; return its path and the axes that MONAI is told."""
    grey = rng.integers(0, 256, (9, 7), np.uint8)
    files = {}
    pictures = {
        "L.png": grey,
        "RGB.png": rng.integers(0, 256, (9, 7, 3), np.uint8),
        "RGBA.png": rng.integers(0, 256, (9, 7, 4), np.uint8),
        "16.png": rng.integers(0, 65536, (9, 7), np.uint16),
        "RGB.jpg": rng.integers(0, 256, (9, 7, 3), np.uint8),
        "L.bmp": grey,
    }
    for name, array in pictures.items():
        Pillow.fromarray(array).save(folder / name)
        files[folder / name] = {}
    Pillow.fromarray(grey > 99).save(folder / "1.png")
    Pillow.fromarray(grey.astype(np.float32) / 3).save(folder / "float.tif")
    files |= {folder / "1.png": {}, folder / "float.tif": {"reader": "PILReader"}}
    tilted = np.array([[0, 0, 2.0, 1], [1, 0, 0, 2], [0, -1.5, 0, 3], [0, 0, 0, 1]])
    volumes = {
        "3d.nii.gz": rng.integers(0, 900, (5, 6, 4)).astype(np.int16),
        "float.nii": rng.normal(size=(5, 6, 4)),
        "channels.nii.gz": rng.normal(size=(5, 6, 4, 2)).astype(np.float32),
        "2d.nii.gz": rng.integers(0, 9, (5, 6)).astype(np.uint8),
    }
    for name, array in volumes.items():
        files[save_nifti(folder / name, array, tilted)] = {}
    scaled = nibabel.Nifti1Image(volumes["3d.nii.gz"], np.eye(4))
    scaled.header.set_slope_inter(0.25, -7)
    nibabel.save(scaled, folder / "scaled.nii.gz")
    np.save(folder / "plain.npy", rng.normal(size=(5, 6, 4)))
    np.savez(folder / "packed.npz", rng.normal(size=(5, 6)))
    files |= {folder / "scaled.nii.gz": {}, folder / "plain.npy": {}, folder / "packed.npz": {}}
    for name in ("axial", "tilted"):
        volume = rng.integers(0, 999, (6, 5, 4))
        files[save_series(folder / name, volume, tilted=name == "tilted")] = {
            "reader": "PydicomReader"
        }
    return files


@pytest.mark.slow
def test_every_format_is_read_as_monai_reads_it(tmp_path, rng):
    from monai.transforms import LoadImage

    for file, options in write_all_formats(tmp_path, rng).items():
        expected = LoadImage(ensure_channel_first=True, **options)(str(file))
        image = read_image(file)
        np.testing.assert_array_equal(
            image.array.astype(np.float32), np.asarray(expected), err_msg=file.name
        )
        if image.affine is not None:
            np.testing.assert_allclose(image.affine, expected.affine, atol=1e-5, err_msg=file.name)


@pytest.mark.slow
def test_channels_of_arrays_and_of_several_files_are_monai_s(tmp_path, rng):
    from monai.transforms import LoadImage

    files = [save_nifti(tmp_path / f"{k}.nii.gz", rng.normal(size=(5, 6, 4))) for k in "ab"]
    expected = LoadImage(ensure_channel_first=True)([str(file) for file in files])
    np.testing.assert_array_equal(read_image(files).array, np.asarray(expected))
    for axis, index in (("first", 0), ("last", -1)):
        np.save(tmp_path / "array.npy", rng.normal(size=(3, 6, 4)))
        loader = LoadImage(reader="NumpyReader", ensure_channel_first=True, channel_dim=index)
        image = read_image(tmp_path / "array.npy", channel_axis=axis)
        expected = np.asarray(loader(str(tmp_path / "array.npy")))
        np.testing.assert_array_equal(image.array.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("shape", "shift", "words"),
    [((5, 6, 4), 0.5, "different places"), ((5, 6, 3), 0, "of the shapes")],
)
def test_channels_of_another_size_or_place_make_no_image(tmp_path, rng, shape, shift, words):
    first = save_nifti(tmp_path / "a.nii", rng.normal(size=(5, 6, 4)))
    affine = np.diag([2.0, 1.0, 0.5, 1.0])
    affine[2, 3] = shift
    second = save_nifti(tmp_path / "b.nii", rng.normal(size=shape), affine)
    with pytest.raises(ImageError, match=words):
        read_image([first, second])


def test_reading_does_not_import_monai_or_torch(tmp_path, rng):
    Pillow.fromarray(rng.integers(0, 256, (9, 7), np.uint8)).save(tmp_path / "a.png")
    code = (
        "import sys, pathlib\nfrom data_prep.images.reading import read_image\n"
        f"read_image(pathlib.Path({str(tmp_path / 'a.png')!r}))\n"
        "print([n for n in ('monai', 'torch', 'pandas', 'nibabel') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_spacing_is_that_of_the_axes(tmp_path, rng):
    tilted = np.array([[0, 0, 2.0, 1], [1, 0, 0, 2], [0, -1.5, 0, 3], [0, 0, 0, 1]])
    file = save_nifti(tmp_path / "a.nii.gz", rng.normal(size=(5, 6, 4)), tilted)
    assert read_image(file).spacing == (1.0, 1.5, 2.0)
    series = save_series(tmp_path / "s", rng.integers(0, 9, (6, 5, 4)), tilted=True)
    assert read_image(series).spacing == (0.75, 0.5, 2.5)  # columns, rows, slices


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.nii", "a.nii.gz", "a.npy", "a.dcm"])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.6])
def test_a_file_that_is_cut_off_is_an_error_of_one_line(tmp_path, rng, name, keep):
    file = tmp_path / name
    if name.endswith(("png", "jpg", "tif")):
        Pillow.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(file)
    elif "nii" in name:
        save_nifti(file, rng.normal(size=(8, 9, 7)))
    elif name.endswith("npy"):
        np.save(file, rng.normal(size=(8, 9)))
    else:
        save_series(tmp_path / "s", rng.integers(0, 9, (30, 30, 1)))
        (tmp_path / "s" / "0.dcm").rename(file)
    content = file.read_bytes()
    read_image(file)
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ImageError, match="damaged or cut off") as caught:
        read_image(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"skip": (1,)}, "not in even steps"),
        ({"NumberOfFrames": 3}, "many frames"),
    ],
)
def test_a_series_that_is_no_volume_is_refused(tmp_path, rng, change, words):
    folder = save_series(tmp_path / "s", rng.integers(0, 9, (6, 5, 4)), **change)
    with pytest.raises(ImageError, match=words):
        read_image(folder)


def test_two_series_in_a_folder_are_refused(tmp_path, rng):
    folder = save_series(tmp_path / "s", rng.integers(0, 9, (6, 5, 1)))
    save_series(tmp_path / "t", rng.integers(0, 9, (6, 5, 1)), uid="9.9")
    (tmp_path / "t" / "0.dcm").rename(folder / "other.dcm")
    with pytest.raises(ImageError, match="holds 2 DICOM series"):
        read_image(folder)


def test_without_pydicom_dicom_is_one_sentence(tmp_path, rng, monkeypatch):
    folder = save_series(tmp_path / "s", rng.integers(0, 9, (6, 5, 2)))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ImageError, match=r"pip install 'fedbn\[dicom\]'"):
        read_image(folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("palette.png", "palette"),
        ("pages.tif", "3 pages"),
        ("strings.npy", "which is no image"),
        ("objects.npy", "cannot be read"),
        ("two.npz", "holds 2 arrays"),
        ("five.nii.gz", "5 axes"),
        ("one.npy", "axes"),
        ("zero.nii.gz", "places no voxel"),
        ("notes.txt", "is no NIfTI, PNG"),
        ("empty", "folder without a DICOM file"),
    ],
)
def test_what_is_no_image_is_said(tmp_path, rng, file, words):
    pictures = [Pillow.fromarray(rng.integers(0, 256, (9, 7), np.uint8)) for _ in range(3)]
    pictures[0].convert("P").save(tmp_path / "palette.png")
    pictures[0].save(tmp_path / "pages.tif", save_all=True, append_images=pictures[1:])
    np.save(tmp_path / "strings.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 2)), b=np.zeros((2, 2)))
    save_nifti(tmp_path / "five.nii.gz", np.zeros((3, 3, 3, 1, 2), np.float32))
    np.save(tmp_path / "one.npy", np.zeros(4))
    flat = nibabel.Nifti1Image(np.zeros((3, 3, 3), np.float32), None)
    flat.header.set_sform(np.diag([0.0, 1, 1, 1]), 1)
    nibabel.save(flat, tmp_path / "zero.nii.gz")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match=words):
        read_image(tmp_path / file)


def test_a_palette_s_numbers_are_a_mask(tmp_path):
    mask = np.array([[0, 1, 2], [2, 1, 0]], np.uint8)
    picture = Pillow.fromarray(mask, mode="P")
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    picture.save(tmp_path / "mask.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png").array[0], mask.T)


def test_ids_are_mapped_all_at_once(tmp_path):
    np.save(tmp_path / "mask.npy", np.array([[0, 1, 255]]))
    mask = read_mask(tmp_path / "mask.npy", {255: 1, 1: 2})
    assert mask.array.tolist() == [[[0, 2, 1]]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([[0.0, 0.5]]), "no whole numbers"),
        (np.array([[0.0, np.nan]]), "no whole numbers"),
        (np.array([[-1, 0]]), "from -1 to 0"),
        (np.array([[0, 70000]]), "from 0 to 70000"),
    ],
)
def test_values_that_are_no_ids_are_refused(tmp_path, array, words):
    np.save(tmp_path / "mask.npy", array)
    with pytest.raises(ImageError, match=words):
        read_mask(tmp_path / "mask.npy")


def test_a_mask_of_colours_or_of_jpeg_is_refused(tmp_path, rng):
    for name in ("mask.png", "mask.jpg"):
        Pillow.fromarray(rng.integers(0, 3, (9, 7, 3), np.uint8)).save(tmp_path / name)
    with pytest.raises(ImageError, match="has 3 channels"):
        read_mask(tmp_path / "mask.png")
    with pytest.raises(ImageError, match="JPEG"):
        read_mask(tmp_path / "mask.jpg")

import gzip

import numpy as np
import pytest

from data_prep.atlas import read_atlas, read_label_table
from data_prep.errors import SourceError

# ------------------------------------------------------------------------------------- the table

TWO = [(3, "Left Pole"), (7, "Vermis_8")]


@pytest.mark.parametrize(
    "text",
    [
        "index,name\n3,Left Pole\n7,Vermis_8\n",
        "\ufeffindex\tname\tcolor\n3\tLeft Pole\t#ff0000\n7\tVermis_8\t#00ff00\n",
        "Label;Region\r\n3;Left Pole\r\n7;Vermis_8\r\n",
        "id,label,hemisphere\n3,Left Pole,L\n7,Vermis_8,\n",
        "ROI ID,ROI Name\n3.0,Left Pole\n7.0,Vermis_8\n",
        'name,index\n"Left Pole",3\n"Vermis_8",7\n',
        "# made by hand\n3 Left Pole\n\n7 Vermis_8 7\n",
        "#No. Label Name: R G B A\n3   Left Pole\n7   Vermis_8   10 20 30 0\n",
        "3\tLeft Pole\n7\tVermis_8\n",
    ],
)
def test_tables_in_the_forms_that_people_have(tmp_path, text):
    file = tmp_path / "labels.txt"
    file.write_bytes(text.encode())
    assert read_label_table(file) == TWO


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "labels.txt is empty; get the file again; read are csv, tsv and semicolon ta"),
        (b"\xff\xfe\x00", "labels.txt is not UTF-8 text; save it as .*; read are"),
        (b"<?xml version='1.0'?>\n<atlas/>\n", "is not a table of text"),
        (b'{"1": "Left Pole"}\n', "is not a table of text"),
        (
            b"index,colour\n3,red\n",
            "has the columns index, colour, of which none is known as the n",
        ),
        (b"code,name\n3,Left\n", "has the columns code, name, of which none is known as the id"),
        (b"index,name\n", "has a header and no row"),
        (b"index,name\n3,Left\n3,Right\n", "has the id 3 twice, in lines 2 and 3"),
        (b"index,name\n3,Left\n7,\n", "line 3: id 7 has no name"),
        (b"index,name\n3.5,Left\n", "line 2: '3.5' is no whole number"),
        (b"name,index\nLeft\n", r"line 2: 1 field\(s\), the header has 2"),
        (b"3 Left\nRight 7\n", "line 2: 'Right 7' is not `id name`; read are"),
        (b"3,Left,10,20\n", "line 1: '3 Left 10 20' is not `id name`"),
    ],
)
def test_another_table_is_refused_with_the_forms_that_are_read(tmp_path, content, message):
    file = tmp_path / "labels.txt"
    file.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_label_table(file)


@pytest.mark.parametrize(
    ("image", "table", "offset", "n_rois", "without_voxel"),
    [
        ("atlas_aal", "labels_aal.csv", 0, 120, []),
        ("atlas_aicha", "labels_aicha.csv", 0, 384, []),
        pytest.param(
            *("atlas_desikan_killiany", "labels_desikan_killiany.csv", 0, 112, []),
            marks=pytest.mark.slow,
        ),
        ("atlas_neuromorphometrics", "labels_neuromorphometrics.csv", 0, 136, []),
        pytest.param(
            *("derived_ho_maxprob25_1mm", "labels_harvard_oxford.csv", 1, 113, []),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("AAL3_1mm", "AAL3.txt", 0, 166, ["35", "36", "81", "82"]), marks=pytest.mark.slow
        ),
    ],
)
def test_real_atlases(atlas_folder, image, table, offset, n_rois, without_voxel):
    atlas = read_atlas(atlas_folder / f"{image}.nii.gz", atlas_folder / table, label_offset=offset)
    assert len(atlas.rois) == n_rois
    assert [roi_id for roi_id, _ in atlas.without_voxel] == without_voxel
    voxels = set(np.unique(np.asanyarray(atlas.image.dataobj)).tolist()) - {0}
    assert {int(roi_id) for roi_id, _ in atlas.rois} == voxels
    assert atlas.title.startswith(f"{image} ({n_rois} ROIs, labels ")


def test_a_table_that_counts_from_0_is_refused(hospital):
    hospital.names = {i - 1: name for i, name in hospital.names.items()}
    hospital.write_table()
    with pytest.raises(SourceError, match=r"gives 'region 1' the id 0, .* add --label-offset 1"):
        read_atlas(hospital.atlas, hospital.table)
    atlas = read_atlas(hospital.atlas, hospital.table, label_offset=1)
    assert atlas.rois == tuple((str(i), f"region {i}") for i in range(1, 10))
    with pytest.raises(SourceError, match="'region 1' the id -1 with --label-offset -1"):
        read_atlas(hospital.atlas, hospital.table, label_offset=-1)


@pytest.mark.slow
def test_a_real_table_that_counts_from_0_is_refused(atlas_folder):
    with pytest.raises(SourceError, match=r"gives 'Left_Frontal_Pole' the id 0, .* --label-off"):
        read_atlas(
            atlas_folder / "derived_ho_maxprob25_1mm.nii.gz",
            atlas_folder / "labels_harvard_oxford.csv",
        )


# ------------------------------------------------------------------------------------- the image


def test_the_table_decides_the_rois_and_their_order(hospital):
    hospital.names = dict(reversed(hospital.names.items())) | {0: "Background", 40: "not there"}
    hospital.write_table()
    atlas = read_atlas(hospital.atlas, hospital.table)
    assert [roi_id for roi_id, _ in atlas.rois] == list("987654321")
    assert atlas.without_voxel == (("40", "not there"),)


def test_a_label_that_the_table_does_not_name(hospital):
    del hospital.names[4], hospital.names[8]
    hospital.write_table()
    with pytest.raises(
        SourceError, match=r"2 label\(s\) that blocks.tsv does not name \(4, 8\); complete the tab"
    ):
        read_atlas(hospital.atlas, hospital.table)
    atlas = read_atlas(hospital.atlas, hospital.table, unlisted="drop")
    assert atlas.unlisted == (4, 8)
    assert [roi_id for roi_id, _ in atlas.rois] == list("1235679")
    assert set(np.unique(np.asanyarray(atlas.image.dataobj))) == {0, 1, 2, 3, 5, 6, 7, 9}


def test_the_content_is_the_same_for_a_file_compressed_again(hospital, tmp_path, write_scan):
    first = read_atlas(hospital.atlas, hospital.table)
    again = tmp_path / "blocks.nii.gz"
    again.write_bytes(gzip.compress(gzip.decompress(hospital.atlas.read_bytes()), 1, mtime=7))
    second = read_atlas(again, hospital.table)
    assert first.image_file[1] != second.image_file[1]
    assert first.title == second.title
    moved = write_scan(tmp_path / "moved" / "blocks.nii.gz", hospital.labels(), origin=(3, 0, 0))
    assert read_atlas(moved, hospital.table).title != first.title


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (
            np.full((4, 4, 4), 1.5),
            {},
            r"has voxels that are no whole number \(such as 1.5\): a probability map",
        ),
        (np.full((4, 4, 4), np.nan), {}, "has voxels that are not finite; it is no label map"),
        (np.full((4, 4, 4), -2, np.int16), {}, "has the negative label -2"),
        (np.zeros((4, 4, 4), np.int16), {}, "holds no label, only 0"),
        (np.ones((4, 4, 4, 3), np.int16), {}, r"is 4D \(4, 4, 4, 3\): a map a region, or a scan"),
        (np.ones((4, 4), np.int16), {}, r"has the shape \(4, 4\)"),
        (np.ones((4, 4, 4), np.int16), {"code": 0}, "does not state where its voxels are"),
    ],
)
def test_an_image_that_is_no_label_map_is_refused(
    hospital, tmp_path, write_scan, data, changes, message
):
    file = write_scan(tmp_path / "odd.nii", data, **changes)
    with pytest.raises(SourceError, match=f"odd.nii {message}"):
        read_atlas(file, hospital.table)


@pytest.mark.parametrize("kind", [np.complex64, np.complex128, [(c, "u1") for c in "RGB"]])
def test_voxels_that_are_no_real_numbers_are_named_with_their_type(hospital, write_scan, kind):
    file = write_scan(hospital.root / "odd.nii", np.zeros((6, 6, 2), kind))
    named = "RGB" if isinstance(kind, list) else np.dtype(kind).name
    with pytest.raises(SourceError, match=f"odd.nii has voxels of the type {named}, and only real"):
        read_atlas(file, hospital.table)


def test_whole_numbers_stored_as_floats_and_a_fourth_axis_of_one_are_read(
    hospital, tmp_path, write_scan
):
    data = hospital.labels().astype(np.float64)[..., np.newaxis]
    atlas = read_atlas(write_scan(tmp_path / "blocks.nii", data), hospital.table)
    assert atlas.title == read_atlas(hospital.atlas, hospital.table).title


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("blocks.nii.gz", None, "is not a file"),
        ("blocks.mgz", b"", "is not named .nii or .nii.gz"),
        ("blocks.nii", b"", "is no readable NIfTI file"),
        ("blocks.nii", b"text" * 200, "is no readable NIfTI file"),
    ],
)
def test_a_file_that_is_no_nifti_is_one_sentence(hospital, tmp_path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_atlas(file, hospital.table)


def test_one_region_is_no_atlas(hospital):
    hospital.names = {1: "alone"}
    hospital.write_table()
    with pytest.raises(SourceError, match=r"names 1 label\(s\) of the atlas"):
        read_atlas(hospital.atlas, hospital.table, unlisted="drop")

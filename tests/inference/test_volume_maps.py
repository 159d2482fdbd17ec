"""Heat maps through slices: values against the formula, pictures, and NIfTI files."""

import gzip
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import gloria_ranks
from helpers.contrastive_systems import colipri, ct_clip, fvlm, hlip
from helpers.errors import raises
from helpers.volume_files import canonical, write_series

import medvl
from medvl.cli import main as cli
from medvl.data.volumes.nifti import read_nifti
from medvl.data.volumes.options import VolumeOptions
from medvl.data.volumes.organs import OrganVolume
from medvl.data.volumes.transform import OriginalVolumeTransform
from medvl.data.volumes.volume import Volume
from medvl.errors import ConfigError, EvaluationError
from medvl.inference.volumes import draw_volume_map, peak_of, write_map
from medvl.models.base import System
from medvl.models.checkpoint import save
from medvl.models.heatmaps import on_volume

TEXT = "left effusion"


def tiny(make) -> System:
    return make(tokenizer=gloria_ranks.tiny_tokenizer(), vocab_size=None).eval()


def test_cells_are_interpolated_at_the_centres_of_voxels() -> None:
    cells = torch.tensor([[[[1.0, 3.0]], [[5.0, 7.0]]]])  # 2 x 1 x 2
    extents = ((0.0, 4.0), (1.0, 2.0), (-1.0, 4.0))
    found = on_volume(cells, extents, (4, 4, 2))[0]
    assert found.shape == (4, 4, 2)
    assert found[:, [0, 3]].isnan().all()  # outside along y
    across = [1 + 2 * 0.25, 1 + 2 * 0.75]  # voxels 0 and 1 are cells 0.25 and 0.75
    down = [0, 0.25, 0.75, 1]
    expected = [[value + 4 * share for value in across] for share in down]
    np.testing.assert_allclose(found[:, 1], expected, rtol=1e-6)


@pytest.mark.parametrize("make", [hlip, ct_clip, colipri])
def test_maps_are_cosines_of_patches_with_the_text(make) -> None:
    model = tiny(make)
    volume = canonical((4, 12, 12))
    found = medvl.heatmap(model, volume, TEXT)
    assert found.shape == volume.shape
    image = torch.from_numpy(volume)[None, None]
    with torch.no_grad():
        features = model.image_encoder(image)
        text = model.encode_text([TEXT])[0]
        if make is hlip:
            vectors = model.image_head(features.patches_BPD)[0]
        else:
            vectors = model.embed_regions(image)[0]
        cosines = F.normalize(vectors, dim=1) @ text
    corner = cosines.unflatten(0, features.grid)[0, 0, 0]
    assert found[0, 0, 0] == pytest.approx(corner.item(), abs=1e-6)
    with raises(ConfigError, "unsupported", "maps"):
        medvl.heatmap(model, volume, TEXT, smoothing=1.0)
    with raises(ConfigError, "empty", "text"):
        medvl.heatmap(model, volume, " ")


def test_maps_of_organs_are_shares_within_the_cut_around_them() -> None:
    model = tiny(fvlm)
    organs = np.zeros((6, 20, 20), np.uint8)
    organs[2:, 12:19, 1:7] = 1  # the middle of their box: 4, 15, 4
    hu = canonical((6, 20, 20))
    found = medvl.heatmap(model, OrganVolume(hu_DHW=hu, organs_DHW=organs), TEXT)
    seen = np.argwhere(np.isfinite(found))
    assert (seen.min(0).tolist(), seen.max(0).tolist()) == ([2, 8, 0], [5, 19, 11])
    cut = np.s_[2:6, 8:20, 0:12]
    batch = [torch.from_numpy(hu[cut].copy())[None, None], torch.from_numpy(organs[cut].copy())]
    batch[1] = batch[1][None]
    with torch.no_grad():
        shares = model.embed_regions(*batch)[0] @ model.embed_texts([TEXT]).global_NE[0]
        similarity = model.similarity(model.embed_images(*batch), [TEXT])
    assert shares.sum() == pytest.approx(similarity.item(), abs=1e-6)
    corner = shares.unflatten(0, model.image_encoder.grid)[-1, -1, 0]
    assert found[5, 19, 0] == pytest.approx(corner.item(), abs=1e-6)
    assert found[2, 8, 11] == pytest.approx(shares[shares != 0].min().item(), abs=1e-6)  # outside


def test_maps_follow_the_spacing_and_size_of_the_shards() -> None:
    """A voxel has the value of the stored voxel that lies at its place."""
    model = tiny(hlip)
    stored = VolumeOptions(spacing=(4.0, 2.0, 2.0), size=(6, 14, 14))
    model.transform = OriginalVolumeTransform(size=(4, 12, 12), shards=stored)
    original = Volume(hu_DHW=canonical((12, 20, 32)), spacing=(2.0, 2.0, 1.0))
    found = medvl.heatmap(model, original, TEXT)
    of_stored = medvl.heatmap(model, model.transform.read(original), TEXT)
    assert found.shape == (12, 20, 32)
    # Stored: 6 x 20 x 16 voxels, cut to 6 x 14 x 14, of which the model sees 4 x 12 x 12.
    seen = np.argwhere(np.isfinite(found))
    assert seen.min(0).tolist() == [2, 4, 4]
    assert seen.max(0).tolist() == [9, 15, 27]
    low, high = found[2:10:2, 4:16, 4:28:2], found[3:10:2, 4:16, 5:28:2]
    inner = of_stored[1:5, 1:13, 1:13]
    np.testing.assert_allclose(
        (low + high)[1:-1, 1:-1, 1:-1] / 2, inner[1:-1, 1:-1, 1:-1], atol=0.1
    )
    assert np.nanmax(found) <= np.nanmax(of_stored) + 1e-6


def test_maps_have_the_voxels_of_their_file(tmp_path: Path) -> None:
    """In a file of another orientation, the highest value is at the voxel that lies there."""
    stored_IJK = canonical((7, 6, 5), seed=3)
    affine = np.array([[0, 0, 2.0, 5], [-1.5, 0, 0, 6], [0, 1.0, 0, 7], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(stored_IJK, affine), tmp_path / "scan.nii.gz")
    volume = read_nifti(tmp_path / "scan.nii.gz")
    as_map = volume.hu_DHW.astype(np.float32)
    write_map(tmp_path / "map.nii.gz", as_map, volume, tmp_path / "scan.nii.gz")
    written = nibabel.load(tmp_path / "map.nii.gz")
    np.testing.assert_array_equal(written.get_fdata(), stored_IJK)
    np.testing.assert_allclose(written.affine, affine)
    write_map(tmp_path / "series.nii.gz", as_map, volume)
    np.testing.assert_array_equal(read_nifti(tmp_path / "series.nii.gz").hu_DHW, volume.hu_DHW)
    assert gzip.decompress((tmp_path / "map.nii.gz").read_bytes())[:2] == b"\x5c\x01"


def test_pictures_show_three_planes_through_the_peak() -> None:
    volume = Volume(hu_DHW=np.full((8, 16, 16), -1000, np.int16), spacing=(4.0, 2.0, 2.0))
    map_DHW = np.zeros((8, 16, 16), np.float32)
    map_DHW[6, 4, 12] = 1.0
    map_DHW[:, :, 0] = np.nan
    assert peak_of(map_DHW) == (6, 4, 12)
    picture = draw_volume_map(volume, map_DHW, (-1150.0, 350.0))
    assert picture.dtype == np.uint8
    height, width = picture.shape[:2]
    below = picture[height // 2 + 9 :, : width // 3].astype(int)  # the axial plane with the map
    red = below[:, :, 0] - below[:, :, 2]
    row, column = np.unravel_index(red.argmax(), red.shape)
    assert (row / 320, column / 320) == pytest.approx((4.5 / 16, 12.5 / 16), abs=0.03)
    with raises(EvaluationError, "empty"):
        draw_volume_map(volume, np.full_like(map_DHW, np.nan), (-1150.0, 350.0))


def test_the_command_writes_pictures_and_maps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save(tiny(hlip), tmp_path / "run")
    hu = np.full((6, 14, 13), 40, np.int16)
    write_series(tmp_path / "series", hu)
    affine = np.diag([-1.0, -1, 2, 1])
    nibabel.save(nibabel.Nifti1Image(hu.T.copy(), affine), tmp_path / "scan.nii.gz")
    files = [str(tmp_path / "scan.nii.gz"), str(tmp_path / "series")]
    command = ["infer", *files, "--checkpoint", tmp_path / "run", "--device", "cpu", "--nifti"]
    cli.main([str(word) for word in [*command, "--texts", TEXT, "--out", tmp_path / "out"]])
    written = sorted(path.name for path in (tmp_path / "out" / "overlays").iterdir())
    assert [Path(name).suffix for name in written] == [".gz", ".png"] * 2
    maps = [nibabel.load(tmp_path / "out" / "overlays" / name) for name in written[::2]]
    assert {each.shape for each in maps} == {(13, 14, 6)}
    assert maps[1].affine[:, 3].tolist() == [10, 20, 100, 1], "the place of the first slice"
    cli.main([str(word) for word in [*command, "--texts", TEXT, "--out", tmp_path / "out"]])
    with pytest.raises(SystemExit):  # other settings
        cli.main([str(word) for word in [*command[:-1], "--texts", TEXT,
                                         "--out", tmp_path / "out"]])  # fmt: skip

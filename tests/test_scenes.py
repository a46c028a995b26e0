"Pictures of the offline world: every cell of a picture looked at, and all that a cell can show."
import numpy as np
import pytest

from debias_clip import scenes as world
from debias_clip.scenes import SHAPES, all_cells, draw_scenes, render

RGB = dict(red=(214, 39, 40), green=(44, 160, 44), blue=(31, 90, 220), yellow=(240, 220, 40),
           purple=(130, 50, 170), orange=(255, 140, 20), white=(245, 245, 245), black=(15, 15, 15))
GROUND_RGB = dict(grey=(150, 150, 150), brown=(150, 115, 80), teal=(95, 160, 160), pink=(225, 170, 185))


@pytest.fixture(scope='module')
def some(): return draw_scenes(400, 7)


def cells(image): return image.reshape(3, 16, 3, 16, 3).swapaxes(1, 2).reshape(9, 256, 3)


def test_every_object_is_drawn_and_nothing_else(some):
    images, areas = render(some, grain=0), {}
    assert images.shape == (400, 48, 48, 3) and images.dtype == np.uint8
    for i, image in enumerate(images):
        ground = np.array(list(GROUND_RGB.values())[some.ground[i]])
        for c, pixels in enumerate(cells(image)):
            empty = (pixels == ground).all(1)
            if not some.present[i, c]: assert empty.all(); continue
            assert (pixels[~empty] == list(RGB.values())[some.colour[i, c]]).all()
            assert 12 <= (~empty).sum() < 220
            areas.setdefault((some.shape[i, c], some.large[i, c]), set()).add(int((~empty).sum()))
    assert len(areas) == 16
    for shape in range(8): assert min(areas[shape, 1]) > max(areas[shape, 0])


def test_shapes_and_shifts_look_different():
    "One scene for each shape, size and shift, all in the middle cell: 144 different pictures, each moved by its shift."
    n = 8*2*9
    shape, large, shift = (a.ravel() for a in np.meshgrid(range(8), range(2), range(9)))
    def in_all_cells(values): return np.repeat(np.asarray(values)[:, None], 9, 1)
    shifts = np.stack([shift//3 - 1, shift % 3 - 1], 1)
    red, grey = np.zeros((n, 9), int), np.zeros(n, int)
    middle_only = np.arange(9) == np.full((n, 1), 4)
    scenes = world.Scenes(middle_only, in_all_cells(shape), red, in_all_cells(large), grey, in_all_cells(shifts), 0)
    middle = render(scenes, grain=0)[:, 16:32, 16:32]
    kinds = zip(shape.tolist(), large.tolist(), map(tuple, shifts.tolist()), strict=True)
    drawn = {kind: (m == RGB['red']).all(-1) for kind, m in zip(kinds, middle, strict=True)}
    assert len({d.tobytes() for d in drawn.values()}) == n
    for (which, size, moved), mask in drawn.items():
        assert (np.roll(drawn[which, size, (0, 0)], moved, (0, 1)) == mask).all(), (which, size, moved)


def test_grain_is_noise_around_the_scene(some):
    clean, noisy = (render(some, grain=g).astype(float) for g in (0, 8.))
    middling = (clean > 40) & (clean < 215)         # away from 0 and 255, where it is cut off
    difference = (noisy - clean)[middling]
    assert abs(difference.std() - 8) < .2 and abs(difference.mean()) < .6      # rounding down costs half a grey level
    assert noisy.min() >= 0 and noisy.max() <= 255


def test_scenes_differ_by_seed_alone():
    a, b, c = draw_scenes(9, 1), draw_scenes(9, 1), draw_scenes(9, 2)
    assert (a.colour == b.colour).all() and a.seed == b.seed
    assert not (a.colour == c.colour).all() and a.seed != c.seed
    count = draw_scenes(1000, 3).present.sum(1)
    assert (count.min(), count.max()) == (3, 6)


def test_all_that_a_cell_can_show_is_what_is_drawn(some):
    "Every cell of clean pictures is one of the cells of its ground, and of the right kind."
    drawn, kinds = all_cells()
    assert len(kinds) == len(SHAPES)*8*2*9
    for i, image in enumerate(render(some, grain=0)[:40]):
        known = {cell.tobytes(): k for k, cell in enumerate(drawn[some.ground[i]])}
        for c, pixels in enumerate(cells(image)):
            k = known[pixels.reshape(16, 16, 3).tobytes()]
            if not some.present[i, c]: assert k == 0; continue
            assert tuple(kinds[k - 1]) == (some.shape[i, c], some.colour[i, c], some.large[i, c])

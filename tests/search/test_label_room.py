"""Ids behind ids: nothing is copied that is there, and nobody sees what others add."""

import pickle

import numpy as np

from amips.search.label_room import LabelRoom


def test_what_is_there_is_not_copied():
    labels, room = LabelRoom().followed_by(np.array(["a", "bbb"]), np.array(["c"]))
    array, low = labels.base, 3
    for _ in range(100):
        more = np.array([f"{low}", "x"])
        longer, room = room.followed_by(labels, more)
        assert longer.base is array
        assert longer.tolist() == [*labels.tolist(), *more.tolist()]
        labels, low = longer, low + 2


def test_two_that_grow_out_of_one_do_not_meet():
    first, room = LabelRoom().followed_by(np.arange(5), np.array([7]))
    one, same = room.followed_by(first, np.array([8, 9]))
    other, another = room.followed_by(first, np.array([10]))
    assert same is room
    assert another is not room
    assert one.tolist() == [0, 1, 2, 3, 4, 7, 8, 9]
    assert other.tolist() == [0, 1, 2, 3, 4, 7, 10]
    assert first.tolist() == [0, 1, 2, 3, 4, 7]


def test_longer_ids_and_full_arrays_are_copied():
    labels, room = LabelRoom().followed_by(np.array(["a"]), np.array(["b"]))
    longer, wide = room.followed_by(labels, np.array(["cc", "dddd"]))
    assert longer.tolist() == ["a", "b", "cc", "dddd"]
    assert wide is not room
    most, _ = wide.followed_by(longer, np.array(["e"] * 5000))
    assert len(most) == 5004
    assert most[-1] == "e"
    assert longer.tolist() == ["a", "b", "cc", "dddd"]


def test_other_labels_and_copies_have_no_room():
    labels, room = LabelRoom().followed_by(np.arange(3), np.array([3]))
    for others, of in ((labels.copy(), room), (labels, pickle.loads(pickle.dumps(room)))):
        longer, new = of.followed_by(others, np.array([9]))
        assert new is not of
        assert longer.tolist() == [0, 1, 2, 3, 9]

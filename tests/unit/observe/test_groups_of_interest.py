from written_run import group

from megatron_rl.observe.groups_of_interest import Answer, GroupFacts, ends, facts, labels, to_keep


def test_labels_name_the_extremes_and_what_went_wrong() -> None:
    groups = [
        GroupFacts("a", (0.5, 0.5), 10, 0, 0),
        GroupFacts("b", (1.0, 1.0), 12, 0, 1),
        GroupFacts("c", (0.0,), 9, 2, 0),
        GroupFacts("d", (), 30, 1, 3),
        GroupFacts("e", (0.75, 0.25), 11, 0, 0),
    ]
    assert labels(groups) == {"c": ["worst", "truncated"], "b": ["best"], "e": ["median"], "d": ["failed", "longest"]}
    assert next(iter(labels(groups))) == "c"
    assert labels([]) == {} and labels([GroupFacts("a", (), 0, 0, 0)]) == {}


def test_trajectories_count_once_by_their_last_sample() -> None:
    answers = [
        Answer(1, "a", 0, 0, 1.0, "length", 50),
        Answer(1, "a", 0, 1, 1.0, "stop", 5),
        Answer(1, "a", None, 2, None, "length", 7),
        Answer(1, "b", 0, 0, 0.25, "stop", 1),
        Answer(1, "b", None, 1, 0.75, "length", 2),
    ]
    assert [(end.group, end.sample) for end in ends(answers)] == [("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert facts(answers, {"a": 2}) == [GroupFacts("a", (1.0,), 50, 1, 3), GroupFacts("b", (0.25, 0.75), 2, 1, 0)]
    assert GroupFacts("b", (0.25, 0.75), 2, 1, 0).mean == 0.5
    assert facts([], {"a": 0, "c": 4}) == [GroupFacts("c", (), 0, 0, 4)], "a group that has failed as a whole"


def test_kept_groups_are_those_of_interest_first() -> None:
    rewards = {"a": [0.5, 0.5], "b": [1.0, 0.5], "c": [0.0, None], "d": [0.6, 0.6], "e": [0.55]}
    groups = [group(name, ["x"] * len(given), given) for name, given in rewards.items()]
    assert to_keep(groups, 9) == ["c", "b", "e", "a", "d"], "worst and failed, best, median, the first of the longest, others"
    assert to_keep(groups, 2) == ["c", "b"] and to_keep(groups, 0) == [] and to_keep([], 4) == []

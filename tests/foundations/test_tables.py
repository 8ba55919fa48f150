"""Tables for people."""

from amips.tables import markdown_table, text_table


def test_markdown_has_a_rule_under_the_head_and_escapes_bars():
    text = markdown_table(["", "FLOPs"], [["a|b", "1"], ["c", ""]])
    assert text == "|  | FLOPs |\n| --- | --- |\n| a\\|b | 1 |\n| c |  |"


def test_plain_columns_are_as_wide_as_they_need_to_be():
    assert text_table(["", "FLOPs"], [["amips", "1"]]) == "       FLOPs\n-----  -----\namips      1"

"""Missing datasets are told in terms of the flag, the file and what is there."""

import json
from argparse import Namespace

import pytest

from mindspeed_lowp.features.data_path import DataPathFeature


@pytest.fixture
def data(tmp_path):
    """A folder with the datasets wiki_text_document and code_text_document, and one without its .bin."""
    for name in ("wiki_text_document", "code_text_document"):
        (tmp_path / f"{name}.idx").touch()
        (tmp_path / f"{name}.bin").touch()
    (tmp_path / "half.idx").touch()
    return tmp_path


def stopped(**args) -> str:
    with pytest.raises(SystemExit) as info:
        DataPathFeature().pre_validate_args(Namespace(**args))
    return str(info.value.code)


def accepts(**args):
    DataPathFeature().pre_validate_args(Namespace(**args))


def test_present_datasets_are_accepted(data):
    wiki, code = f"{data}/wiki_text_document", f"{data}/code_text_document"
    accepts(data_path=[wiki])
    accepts(data_path=[wiki, code])
    accepts(data_path=["30", wiki, "0.7", code])
    accepts(data_path=[wiki, code, wiki])
    accepts(train_data_path=[wiki], valid_data_path=None, test_data_path=[code])
    accepts(data_path=["s3://bucket/corpus", "msc://profile/corpus"])
    accepts()


@pytest.mark.parametrize("name", ["data_path", "train_data_path", "valid_data_path", "test_data_path"])
def test_each_flag_is_named(data, name):
    prefix = f"{data}/wiki_txt_document"
    message = stopped(**{name: ["1", f"{data}/code_text_document", "2", prefix]})
    flag = "--" + name.replace("_", "-")
    assert message.startswith(
        f"error: {flag}: dataset {prefix}: no file {prefix}.idx and no file {prefix}.bin; "
    )
    assert message.endswith(f"the nearest in {data}: wiki_text_document, code_text_document")


def test_only_the_missing_file_is_named(data):
    message = stopped(data_path=[f"{data}/half"])
    assert f"no file {data}/half.bin;" in message and "half.idx" not in message


def test_suffix_typed_with_the_prefix(data):
    message = stopped(data_path=[f"{data}/wiki_text_document.bin"])
    assert message.endswith(f"give the prefix without .bin: {data}/wiki_text_document")


def test_no_such_directory(data):
    assert stopped(data_path=[f"{data}/nowhere/wiki"]).endswith(f"there is no directory {data}/nowhere")


def test_directory_without_datasets(data):
    (data / "empty").mkdir()
    assert stopped(data_path=[f"{data}/empty/x"]).endswith(
        f"no dataset (an .idx with its .bin) in {data}/empty"
    )


def test_nothing_alike_lists_what_is_there(data):
    message = stopped(data_path=[f"{data}/qqq"])
    assert message.endswith(f"the nearest in {data}: code_text_document, wiki_text_document")


def test_relative_prefix_is_reported_with_its_directory(data, monkeypatch):
    monkeypatch.chdir(data)
    assert f"the nearest in {data}: " in stopped(data_path=["wiki_text"])


def test_weights_mixed_with_bare_prefixes(data):
    wiki = f"{data}/wiki_text_document"
    message = stopped(data_path=["30", wiki, wiki, wiki])
    assert message.startswith("error: --data-path 30 ") and "a weight before each prefix" in message
    assert "30 is read as a prefix" in stopped(data_path=["30", wiki, wiki])


def test_file_of_arguments(data):
    listed = data / "args.txt"
    listed.write_text(f"30 {data}/wiki_text_document\n70 {data}/missing\n")
    message = stopped(data_args_path=str(listed))
    assert message.startswith(f"error: --data-args-path {listed}: dataset {data}/missing: no file")
    assert stopped(data_args_path="gone.txt") == "error: --data-args-path gone.txt: No such file or directory"


def test_file_of_arguments_per_split(data):
    listed = data / "args.json"
    wiki = f"{data}/wiki_text_document"
    flag = f"error: --per-split-data-args-path {listed}"
    listed.write_text(json.dumps({"train": [1, wiki], "valid": f"1 {data}/missing", "test": None}))
    assert stopped(per_split_data_args_path=str(listed)).startswith(
        f"{flag} (valid): dataset {data}/missing: "
    )
    listed.write_text(json.dumps({"train": [wiki]}))
    assert stopped(per_split_data_args_path=str(listed)).endswith("missing: valid, test")
    listed.write_text("train:")
    assert stopped(per_split_data_args_path=str(listed)).startswith(f"{flag}: not a JSON file")


def test_other_kinds_of_data_are_not_looked_at(data):
    accepts(data_path=["x.jsonl"], sft=True)
    accepts(data_path=["x"], dataloader_type="external")


def test_through_megatrons_parser(stops, data):
    message = stops(f"--bf16 --data-path 1 {data}/wiki_text_document 2 {data}/wiki")
    assert message.startswith(f"error: --data-path: dataset {data}/wiki: no file")


def test_no_dataset_at_all():
    assert (
        stopped(mock_data=False) == "error: no dataset: add --data-path PREFIX, or --mock-data to train on "
        "made-up tokens"
    )
    accepts(mock_data=True)


def test_lists_that_are_not_lists(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[1, 2]")
    assert stopped(data_args_path=f"{tmp_path}/empty").endswith("names no dataset")
    assert stopped(data_args_path=f"{tmp_path}/binary").endswith("not a text file")
    assert "expected a JSON object" in stopped(per_split_data_args_path=f"{tmp_path}/list.json")

"""Packed documents in the program of a pipeline."""

from tests.document_programs import check_documents


def test_documents_of_a_pipeline_are_a_call_for_each_class_of_lengths_and_no_mask():
    check_documents(pp=2, fsdp=4)

"""A retrieval task of MTEB from data in memory: no hub, no network."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from mteb import TaskMetadata
from mteb.abstasks.retrieval import AbsTaskRetrieval


def local_task(
    queries: dict[str, list[Any]],
    corpus: dict[str, list[Any]],
    relevant: dict[str, dict[str, int]],
    modalities: tuple[str, ...] = ("text",),
    category: str = "t2t",
) -> AbsTaskRetrieval:
    """The task whose queries and corpus have the columns id and text or image."""

    class LocalTask(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="LocalTask",
            description="A test's own collection.",
            dataset={"path": "none/none", "revision": "none"},
            type="Retrieval" if modalities == ("text",) else "Any2AnyRetrieval",
            modalities=list(modalities),
            category=category,
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, *args: Any, **kwargs: Any) -> None:
            split = {
                "corpus": Dataset.from_dict(corpus),
                "queries": Dataset.from_dict(queries),
                "relevant_docs": relevant,
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return LocalTask()

"""Headers of weights on the Hub, without the weights: a safetensors file starts with the list of what it holds."""

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
)

Header = dict[str, tuple[tuple[int, ...], str]]


def remote_header(
    repo: str, name: str, *, revision: str | None, subfolder: str | None, token: str | bool | None
) -> Header | None:
    """Shape and dtype of every tensor in a repository's file, by name; `None` when there is no such file.

    Raises:
        ValueError: when the file is no safetensors file, or cannot be reached.
    """
    path = f"{subfolder}/{name}" if subfolder else name
    try:
        metadata = HfApi().parse_safetensors_file_metadata(repo, path, revision=revision, token=token)
    except (EntryNotFoundError, NotASafetensorsRepoError):
        return None
    except (SafetensorsParsingError, HfHubHTTPError) as error:
        raise ValueError(f"{repo!r}: the header of {path} cannot be read: {error}") from error
    return {name: (tuple(info.shape), info.dtype) for name, info in metadata.tensors.items()}


__all__ = ["Header", "remote_header"]

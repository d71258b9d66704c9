"""Upload of a finished folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from mlx_redrafter.errors import CheckpointError
from mlx_redrafter.escaping import describe_error


def upload_folder(folder: Path, repo: str) -> str:
    """Upload a folder, creating the repository if need be, with the user's stored credentials.

    Returns:
        The repository's URL.

    Raises:
        CheckpointError: The hub cannot be reached or rejects the folder, which is kept.
    """
    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder)
    except Exception as error:  # its libraries have exceptions of their own, and change
        raise CheckpointError(
            f"{folder} is complete but could not be uploaded to {repo!r}: {describe_error(error)}; "
            "check the name, the network and `hf auth login`, then `hf upload`"
        ) from error
    return str(address)

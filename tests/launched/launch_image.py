"""Started by the tests on two processes: steps of image classifiers, a small run, and images that are damaged."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
from accelerate.utils import InitProcessGroupKwargs

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "recipes")]

from image_cases import batch_of, package_step, pieces_of, small_recipe, write_folders  # noqa: E402
from image_cls import run  # noqa: E402
from step_cases import EFFECTIVE, TWO_PROCESS_CUTS  # noqa: E402

from accumft.data.image_files import read_image_splits  # noqa: E402
from accumft.data.image_splits import load_image_data  # noqa: E402
from accumft.errors import UserError  # noqa: E402
from accumft.launch import make_accelerator, reset_accelerate_state  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    accelerator = make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    assert accelerator.num_processes == 2
    rank, found = accelerator.process_index, {}
    for kind in ("vit", "efficientnet"):
        for name, cut in TWO_PROCESS_CUTS.items():
            pieces = pieces_of(cut[rank], start=sum(cut[0]) * rank)
            weights, result, _ = package_step(accelerator, kind, batch_of(EFFECTIVE), pieces)
            found[f"{kind} {name}"] = {"weights": weights, "loss": result.loss}
    torch.save(found, folder / f"{rank}.pt")
    if rank == 0:
        images = write_folders(folder / "images")
        for number in (1, 4):
            path = images / "bar" / f"{number}.png"
            path.write_bytes(path.read_bytes()[:60])
    accelerator.wait_for_everyone()
    recipe = small_recipe(folder / "none", train_file=str(folder / "images"))
    try:
        load_image_data(read_image_splits(recipe), recipe)
    except UserError as error:
        (folder / f"broken.{rank}").write_text(str(error))
    accelerator.wait_for_everyone()
    reset_accelerate_state()
    run(small_recipe(folder / "run", per_device_train_batch_size=5, max_steps=4))


if __name__ == "__main__":
    main()

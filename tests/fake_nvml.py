"""A library that answers as NVML does, compiled from C: cards whose counters are numbers in files.

`Cards(folder)` compiles `libnvidia-ml.so.1` into the folder; programs with this folder in LD_LIBRARY_PATH load it. Card k has
the counter in `folder/k.mj`, in millijoules; without the file it has no counter, and without a number it fails.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.extras import need_programs

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int status; typedef long *device;
static long cards[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static status take(long number, device *found) { *found = &cards[number]; return 0; }
status nvmlInit_v2(void) { return 0; }
status nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found) { return index < 8 ? take(index, found) : 2; }
status nvmlDeviceGetHandleByUUID(const char *name, device *found) {
  return strncmp(name, "GPU-fake-", 9) ? 6 : take(atol(name + 9), found);
}
status nvmlDeviceGetHandleByPciBusId_v2(const char *name, device *found) { return 6; }
status nvmlDeviceGetUUID(device card, char *text, unsigned size) { snprintf(text, size, "GPU-fake-%ld", *card); return 0; }
status nvmlDeviceGetTotalEnergyConsumption(device card, unsigned long long *millijoules) {
  char path[4096]; snprintf(path, sizeof path, "%s/%ld.mj", FOLDER, *card);
  FILE *file = fopen(path, "r");
  if (!file) return 3;
  int read = fscanf(file, "%llu", millijoules);
  fclose(file);
  return read == 1 ? 0 : 999;
}
"""


class Cards:
    """Fake cards, whose counters a test sets."""

    def __init__(self, folder: Path) -> None:
        need_programs("cc")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        source = folder / "nvml.c"
        source.write_text(_SOURCE)
        subprocess.run(
            ["cc", "-shared", "-fPIC", f'-DFOLDER="{folder}"', "-o", str(folder / "libnvidia-ml.so.1"), str(source)],
            check=True,
        )

    def set(self, card: int, millijoules: int | str) -> None:
        temporary = self.folder / f"{card}.new"
        temporary.write_text(f"{millijoules}\n")
        temporary.replace(self.folder / f"{card}.mj")

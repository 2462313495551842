"""A seed that version 0.1.0 has made: the virtual file is in the top directory of its
only subvolume, and new files have no checksums.
"""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

OLD_VIRTUAL_BYTES = 64 << 30

#: mkseed --virtual-data-size=64G --metadata-only, as a sparse archive. All of it is
#: metadata: 160 KiB, of which most are zeroes.
_ARCHIVE = """
/Td6WFoAAATm1rRGAgAhARwAAAAQz1jM4s//BOldADmZbMgtDMWaRd1IFGm/qli6Vx5yBs+RINsG
Rt6NmR2H5Xb8POw/Xqhg0ZyV6Wo05o6pWbtXuhpgjr3cPw1sNlctDdKhmIltHRp1TcPl1lmoioht
jrpNPJKqq7TJZcbD4UnHh4NqY2o8Ud0XUSTW3+lg8heKM5qKZkhV1/xZ4RhjLti/MpnNRXePQVz6
44YV8i/yOoPbiyUtD4ScGikdPtDUUkMsobgQqa8yIT3P2Gy6UERegTdqrZkG1ob5CEMUbj9CkHim
JRFeCqWwKwXs61QDTZWJ97nd+P+ZGPGwf2OW1mkqvwGFgm0uWuR2x0C4A93Leqk2dJCp6xqzCT73
n7LLuLfujyM02mrZgw/nrjLpc5A3eaYiHhXzeVtPDz1GbXp/vYFGGx4wkA5s7KG4g7PMlVkZEhKh
B5kuKD01Ogozo1Yw/09p6kK8u5HI3lvVZHZonO3Z6a2yP53PNhLRWdJCXS2X/BxNNLn0pl+gPQCp
z/YnxnIZh5FIxeI64u0XErYZEDy5wlH4E4btB3uM2LefiDXHL+stZgV2OMCileU5K9UbO03j8k6/
tNNkPLQPtHgl3HFTIX524OuL4TMklhj2o4YW5jYqI8WaeiS9GlW7q41WIQli3vnbiBIZw4dpfyva
ZKvx4Mb06FmpxCnNwCuLK91u5q63uLcRZVZmNlu/cTeeOrZxQqgs1gAWU1WdgOKqIztjRxepw7qD
CAOyzssZvAjsOCE3FkT43ecPOSK4VLqgaMxRuAfVEm0ba5dN493/BzkxfGCzG/zHKPhJrIaX6E50
t/RgTInQC1kxr7PUEWxpDhnO6dryuu02br0avQWSaH/PnbIF5wKps8r6Kaox3Z3UQh1SaeaMf3Io
Av7zy06qLCQj2PyjMN5RVlfDrh/mmzYx728odAzGZLK+CdFaC02rZyB9+nvLW1GnczPWfLI20veg
aFAnWDtwOmP1iN3BC1b6/xR2fsUTDu0mm6LOay2BwpqRf94sBmS1gWzAU2CtpUtX2w17ul0KB/jh
U8u/aPc4GoDey+I8ew99iWSLaA6T+1v0h5tNamEHPsKWaJTe9Ikg95j8PRTxQdK5S8e1YgdnBuDt
+/2E2/ta8bWQv4rRKHwFM/5a+SYZrMBTKV3J/KYEVw4fnNZY3fbINvuNuKcIt+lfIEaPpkke4uko
1xNr7Cwr4xTb1lei4G+yxBrnsUcRr5VzYc+bPpoiWcPYq1Lv+pRYGs3M9IvJklMC3ueCP77C1wTY
b33Ij3S5JREch3huK7+irhO3NRsUASlUQw+B/Lp/uIKzZii6BWZb69VwTPOwx78vXF10eq5bifpx
Nnq35iqKgIaqsbx6U9uRq4QcD+JB0y2Rnd7wWKHx2qh2GTEcG7pbidQcaCgS4xcsoCvJ07k0hJTA
CgV8+9nwioKN6II5blyi6Ix2Sqs0K8gsxJCBJO3R36/Xa+NnoTfiyNZLtq8M+F7hfg5+5eanoJ+L
M01lKbzBfz+kUTBRve/7Vyj8bM9ltIcTmVkD6nu942N65MwBZTaCeLbPT8WfUFmnxeOXMEXzm8iv
biP+dE6/ZnyKWx7smdqVOsmIEIAf8p5atb+eSZ0XrYCThZM9ipmnnAL/ZmHzGBAglsf25KwKcVSP
bCF+diuTryLcOtDFyccmIjO62A3buNvFQP/tNC4CNlkhrgAAAACIuL14LO/UoQABhQqAoAsAh3tN
ELHEZ/sCAAAAAARZWg==
"""


def unpack_old_seed(directory: Path) -> Path:
    """The image, in a directory on a file system that has large sparse files."""
    archive = io.BytesIO(base64.b64decode(_ARCHIVE))
    with tarfile.open(fileobj=archive, mode="r:xz") as tar:
        (member,) = tar.getmembers()
        tar.extract(member, directory, filter="data")
    return directory / member.name

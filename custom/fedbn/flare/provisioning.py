"""What fedbn adds to ``nvflare provision``: startup kits whose every file is signed."""

from __future__ import annotations

from nvflare.lighter.constants import CtxKey, ProvFileName
from nvflare.lighter.spec import Builder, Project, ProvisionContext
from nvflare.lighter.utils import sign_folders


class SignedStartupBuilder(Builder):
    """Sign the ``startup`` folder of every kit, so that a server or client refuses an edited one.

    FLARE checks ``startup/signature.json`` at each start if there is one, but in FLARE 2.9 its own
    ``SignatureBuilder`` writes it only for kits with homomorphic encryption or confidential
    computing: without it an edited ``fed_client.json`` is used as it stands. The folder ``local``
    is not signed; it belongs to the site.

    It has to be the last of the project file's builders. The signature is checked against the
    kit's own ``rootCA.pem``: it shows an edit by mistake, and no more than the certificates allow
    to one who can write into the kit.
    """

    def build(self, project: Project, ctx: ProvisionContext) -> None:
        """Sign every file below ``startup`` with the project's root key."""
        root_key = ctx.get(CtxKey.ROOT_PRI_KEY)
        if root_key is None:
            raise RuntimeError(
                "no root key to sign with: SignedStartupBuilder must come after CertBuilder"
            )
        for participant in project.get_all_participants():
            sign_folders(
                ctx.get_kit_dir(participant), root_key, signature_file=ProvFileName.SIGNATURE_JSON
            )

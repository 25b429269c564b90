"""Path of a class in bundles that version 0.1 exported; goes in version 0.3."""

from fedbn.tasks.site_network import SiteNetwork as SiteNetwork

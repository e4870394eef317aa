# What cloud-init writes and starts. No secret is in it: nodes read theirs from the parameter store at each boot.

locals {
  machine = "${path.module}/../../machine"
  # Of every node of the pool, whatever its zone, type and market: also what the controller expects of one that it makes.
  labels = join(",", [for name, value in merge(var.labels, { pool = var.name }) : "${name}=${value}"])
  units  = ["sllm-boot.service", "sllm-node.service", "sllm-watch.service"]

  node_env = templatefile("${path.module}/templates/node.env.tftpl", {
    home         = "/mnt/sllm"
    nats_url     = var.nats_url
    nats_ca      = "/run/sllm/nats-ca.pem"
    nats_creds   = "/run/sllm/nats.creds"
    node_drain_s = var.node_drain_s
    # Of one type all have what the controller is told: the driver's names are longer, and it does not tell the memory.
    settings = merge(
      length(var.instance_types) == 1 ? { SLLM_GPUS = local.shape.gpus } : {},
      var.settings, { AWS_DEFAULT_REGION = var.region },
    )
  })

  boot_env = templatefile("${path.module}/templates/boot.env.tftpl", {
    packages         = "mdadm xfsprogs"
    group            = var.name
    region           = var.region
    artifact_url     = var.artifact_url
    artifact_sha256  = var.artifact_sha256
    parameter_prefix = var.parameter_prefix
    labels           = local.labels
    peer_port        = var.peer_port
    storage_key      = "" # the instance's role reads the bucket
    account          = "sllm"
    mount            = "/mnt/sllm"
    prefix           = "/opt/sllm"
    run              = "/run/sllm"
    cdi_file         = "/etc/cdi/nvidia.yaml"
    huge_pages       = "/sys/kernel/mm/transparent_hugepage"
    # Where the kernel has it: Ubuntu's.
    userns_restricted = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"
    sysctl_file       = "/etc/sysctl.d/90-sllm.conf"
  })

  files = {
    "/etc/sllm/node.env"                    = local.node_env
    "/etc/sllm/boot.env"                    = local.boot_env
    "/usr/local/lib/sllm/boot.sh"           = file("${local.machine}/boot.sh")
    "/usr/local/lib/sllm/cloud.sh"          = file("${local.machine}/aws.sh")
    "/usr/local/lib/sllm/stages.sh"         = file("${local.machine}/node/stages.sh")
    "/usr/local/lib/sllm/node.sh"           = file("${local.machine}/node/node.sh")
    "/usr/local/lib/sllm/watch.sh"          = file("${local.machine}/node/watch.sh")
    "/etc/systemd/system/${local.units[0]}" = file("${local.machine}/sllm-boot.service")
    "/etc/systemd/system/${local.units[1]}" = templatefile("${local.machine}/node/sllm-node.service", { stop_timeout_s = var.node_drain_s + 30 })
    "/etc/systemd/system/${local.units[2]}" = file("${local.machine}/sllm-watch.service")
  }

  cloud_config = templatefile("${local.machine}/user_data.yaml.tftpl", {
    mask  = ["dlami-nvme.service"]
    units = local.units
    files = local.files
  })

  # cloud-init unpacks it; AWS takes 16 KiB.
  user_data = base64gzip(local.cloud_config)
}

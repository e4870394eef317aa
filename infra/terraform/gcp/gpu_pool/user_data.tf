# What cloud-init writes and starts: the same scripts as on AWS. No secret is in it.

locals {
  modules = "${path.module}/../../modules/gpu_pool"
  machine = "${path.module}/../../machine"

  # Cloud Storage as S3's clients speak to it.
  storage = { AWS_ENDPOINT_URL_S3 = "https://storage.googleapis.com", AWS_DEFAULT_REGION = "auto" }

  node_env = templatefile("${local.modules}/templates/node.env.tftpl", {
    home         = "/mnt/sllm"
    nats_url     = var.nats_url
    nats_ca      = "/run/sllm/nats-ca.pem"
    nats_creds   = "/run/sllm/nats.creds"
    node_drain_s = var.node_drain_s
    settings     = merge(var.settings, var.storage_key ? local.storage : {})
  })

  boot_env = templatefile("${local.modules}/templates/boot.env.tftpl", {
    packages         = "" # the image has them
    group            = var.name
    region           = var.region
    artifact_url     = var.artifact_url
    artifact_sha256  = var.artifact_sha256
    parameter_prefix = "/${var.secret_prefix}"
    labels           = "pool=${var.name}"
    peer_port        = var.peer_port
    storage_key      = var.storage_key ? "yes" : ""
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

  cloud_config = templatefile("${local.machine}/user_data.yaml.tftpl", {
    mask  = []
    units = ["sllm-boot.service", "sllm-node.service", "sllm-watch.service"]
    files = {
      "/etc/sllm/node.env"                     = local.node_env
      "/etc/sllm/boot.env"                     = local.boot_env
      "/usr/local/lib/sllm/boot.sh"            = file("${local.machine}/boot.sh")
      "/usr/local/lib/sllm/cloud.sh"           = file("${local.machine}/gcp.sh")
      "/usr/local/lib/sllm/stages.sh"          = file("${local.machine}/node/stages.sh")
      "/usr/local/lib/sllm/node.sh"            = file("${local.machine}/node/node.sh")
      "/usr/local/lib/sllm/watch.sh"           = file("${local.machine}/node/watch.sh")
      "/etc/systemd/system/sllm-boot.service"  = file("${local.machine}/sllm-boot.service")
      "/etc/systemd/system/sllm-node.service"  = templatefile("${local.machine}/node/sllm-node.service", { stop_timeout_s = var.node_drain_s + 5 })
      "/etc/systemd/system/sllm-watch.service" = file("${local.machine}/sllm-watch.service")
    }
  })
}
